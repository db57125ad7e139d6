// Every collective by its name, with tensors that fit: what the tests of faults and of skew call.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <string>
#include <vector>

#include "trireme/comm/group.h"

namespace trireme {

struct NamedCall {
  std::string name;
  std::function<void(Group&, int64_t numel)> run;
};

inline const std::vector<NamedCall>& every_collective() {
  static const std::vector<NamedCall> calls{
      {"all_reduce",
       [](Group& group, int64_t numel) {
         at::Tensor tensor = at::ones({numel});
         group.all_reduce(tensor).wait();
       }},
      {"reduce_scatter",
       [](Group& group, int64_t numel) {
         at::Tensor shard = at::empty({shard_range(numel, group.size(), group.rank()).numel()});
         group.reduce_scatter(shard, at::ones({numel})).wait();
       }},
      {"all_gather",
       [](Group& group, int64_t numel) {
         group.all_gather(at::empty({numel}), at::ones({shard_range(numel, group.size(), group.rank()).numel()}))
             .wait();
       }},
      {"broadcast", [](Group& group, int64_t numel) { group.broadcast(at::ones({numel}), 0).wait(); }},
      {"all_to_all",
       [](Group& group, int64_t numel) {
         group.all_to_all(at::empty({numel * group.size()}), at::ones({numel * group.size()})).wait();
       }},
      {"gather", [](Group& group,
                    int64_t numel) { group.gather(at::empty({numel * group.size()}), at::ones({numel}), 0).wait(); }},
      {"scatter", [](Group& group,
                     int64_t numel) { group.scatter(at::empty({numel}), at::ones({numel * group.size()}), 0).wait(); }},
      {"barrier", [](Group& group, int64_t) { group.barrier(); }},
      {"recv",
       [](Group& group, int64_t numel) {
         auto sent = group.send(at::ones({numel}), (group.rank() + 1) % group.size());
         group.recv(at::empty({numel}), (group.rank() + group.size() - 1) % group.size()).wait();
         sent.wait();
       }},
  };
  return calls;
}

inline const NamedCall& collective(const std::string& name) {
  for (const NamedCall& call : every_collective())
    if (call.name == name) return call;
  std::abort();
}

}  // namespace trireme
