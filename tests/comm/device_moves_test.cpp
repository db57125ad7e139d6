// Results of groups over devices: the same as those of the host's groups beneath them, which other tests check.
#include <mutex>

#include "tests/comm/device_cases.h"
#include "tests/support/becomes_true.h"

// Without the headers of NCCL and CUDA there are no such groups to test.
namespace trireme {
namespace {

using testing::FakeOperation;

class DeviceCollectives : public OnEveryTransport {
 protected:
  /// Runs on worlds of 1, 2 and 3, without the host ever waiting for a device.
  void run_without_waits(const std::function<void(DeviceRank&)>& body) const {
    for (const int size : {1, 2, 3}) run(size, body);
  }
};

/// Calls `call` with tensors of the device and with the same ones of the host; both must leave the same bits.
class Comparison {
 public:
  explicit Comparison(DeviceRank& rank, const testing::FakeRecord& record) : rank_(rank), record_(record) {}

  using Call = std::function<Pending<void>(Group& group, const at::Tensor& output, const at::Tensor& input)>;
  /// `output` is what the call writes; either may be undefined.
  void check(const at::Tensor& output, const at::Tensor& input, const Call& call) const {
    const at::Tensor device_output = copied(output, rank_.device());
    const at::Tensor device_input = input.is_same(output) ? device_output : copied(input, rank_.device());
    const at::Tensor host_output = copied(output, at::kCPU);
    const at::Tensor host_input = input.is_same(output) ? host_output : copied(input, at::kCPU);
    rank_.host().barrier();  // all ranks' tensors are there
    const int64_t waits = record_.host_waits();
    call(rank_.group(), device_output, device_input).wait();
    rank_.host().barrier();
    EXPECT_EQ(record_.host_waits(), waits);
    rank_.host().barrier();  // and nobody has looked at results yet
    call(rank_.host(), host_output, host_input).wait();
    if (host_output.defined()) {
      EXPECT_TRUE(equal_bits(device_output.cpu(), host_output)) << describe(host_output);
    }
  }

 private:
  static at::Tensor copied(const at::Tensor& tensor, c10::Device device) {
    return tensor.defined() ? at::empty_like(tensor, tensor.options().device(device)).copy_(tensor) : tensor;
  }
  /// NaNs have many bits, and all are one.
  static bool equal_bits(const at::Tensor& left, const at::Tensor& right) {
    const auto bits = [](const at::Tensor& tensor) { return tensor.masked_fill(tensor.isnan(), 0).view(at::kByte); };
    return at::equal(left.isnan(), right.isnan()) && at::equal(bits(left), bits(right));
  }
  static std::string describe(const at::Tensor& tensor) {
    return std::string(c10::toString(tensor.scalar_type())) + " numel " + std::to_string(tensor.numel());
  }

  DeviceRank& rank_;
  const testing::FakeRecord& record_;
};

template <class Body>
void for_each_length(const Body& body) {
  for (const at::ScalarType dtype : all_dtypes())
    for (const int64_t numel : {0, 1, 3, 1000, 8209}) body(dtype, numel);
  body(at::kFloat, 300007);
}

bool has(at::ScalarType dtype, ReduceOp op) {
  if (dtype == at::kBool) return op == ReduceOp::kMax || op == ReduceOp::kMin;
  return op != ReduceOp::kMean || at::isFloatingType(dtype);
}

/// Numbers whose sums show the order in which they are made, where that is told apart.
at::Tensor values(int64_t numel, int rank, at::ScalarType dtype) {
  const at::Tensor exact = numbers(numel, rank, dtype);
  return at::isFloatingType(dtype) ? (exact.to(at::kDouble) / 3 + rank).to(dtype) : exact;
}

TEST_P(DeviceCollectives, AllReduceIsThatOfTheHost) {
  run_without_waits([&](DeviceRank& rank) {
    for_each_length([&](at::ScalarType dtype, int64_t numel) {
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMax, ReduceOp::kMin}) {
        if (!has(dtype, op)) continue;
        const at::Tensor tensor = values(numel, rank.id(), dtype);
        Comparison(rank, record()).check(tensor, tensor, [op](Group& group, const at::Tensor& t, const at::Tensor&) {
          return group.all_reduce(t, op);
        });
      }
    });
  });
}

TEST_P(DeviceCollectives, ReduceScatterIsThatOfTheHost) {
  run_without_waits([&](DeviceRank& rank) {
    for_each_length([&](at::ScalarType dtype, int64_t numel) {
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMax, ReduceOp::kMin}) {
        if (!has(dtype, op)) continue;
        const at::Tensor shard = at::zeros({shard_range(numel, rank.size(), rank.id()).numel()}, dtype);
        Comparison(rank, record())
            .check(shard, values(numel, rank.id(), dtype),
                   [op](Group& group, const at::Tensor& output, const at::Tensor& input) {
                     return group.reduce_scatter(output, input, op);
                   });
      }
    });
  });
}

TEST_P(DeviceCollectives, ReduceScatterWidensToFp32WithTheBitsOfTheHost) {
  run_without_waits([&](DeviceRank& rank) {
    for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean}) {
        const at::Tensor shard = at::zeros({shard_range(8209, rank.size(), rank.id()).numel()});
        Comparison(rank, record())
            .check(shard, values(8209, rank.id(), dtype),
                   [op](Group& group, const at::Tensor& output, const at::Tensor& input) {
                     return group.reduce_scatter(output, input, op);
                   });
      }
    }
  });
}

TEST_P(DeviceCollectives, AMaximumKeepsNaNsAndTheSignOfZero) {
  run_without_waits([&](DeviceRank& rank) {
    const double zero = rank.id() % 2 == 0 ? 0.0 : -0.0;
    const at::Tensor tensor = at::tensor({rank.id() == rank.size() - 1 ? std::nan("") : 1.0, zero, 1.0 * rank.id()});
    for (const ReduceOp op : {ReduceOp::kMax, ReduceOp::kMin})
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16})
        Comparison(rank, record())
            .check(tensor.to(dtype), {},
                   [op](Group& group, const at::Tensor& t, const at::Tensor&) { return group.all_reduce(t, op); });
  });
}

TEST_P(DeviceCollectives, AllGatherIsThatOfTheHost) {
  run_without_waits([&](DeviceRank& rank) {
    for_each_length([&](at::ScalarType dtype, int64_t numel) {
      const ShardRange own = shard_range(numel, rank.size(), rank.id());
      const auto gather = [](Group& group, const at::Tensor& output, const at::Tensor& input) {
        return group.all_gather(output, input);
      };
      const at::Tensor whole = at::zeros({numel}, dtype);
      Comparison(rank, record()).check(whole, numbers(own.numel(), rank.id(), dtype), gather);
      const auto in_place = [own](Group& group, const at::Tensor& output, const at::Tensor&) {
        return group.all_gather(output, output.slice(0, own.begin, own.end));
      };
      Comparison(rank, record()).check(numbers(numel, rank.id(), dtype), {}, in_place);
    });
  });
}

TEST_P(DeviceCollectives, BroadcastIsThatOfTheHost) {
  run_without_waits([&](DeviceRank& rank) {
    for_each_length([&](at::ScalarType dtype, int64_t numel) {
      const at::Tensor tensor = numbers(numel, rank.id(), dtype);
      Comparison(rank, record()).check(tensor, tensor, [&](Group& group, const at::Tensor& t, const at::Tensor&) {
        return group.broadcast(t, rank.size() - 1);
      });
    });
  });
}

TEST_P(DeviceCollectives, AllToAllIsThatOfTheHost) {
  run_without_waits([&](DeviceRank& rank) {
    for_each_length([&](at::ScalarType dtype, int64_t numel) {
      const at::Tensor input = numbers(numel * rank.size(), rank.id(), dtype);
      Comparison(rank, record())
          .check(at::zeros_like(input), input, [](Group& group, const at::Tensor& output, const at::Tensor& t) {
            return group.all_to_all(output, t);
          });
    });
  });
}

TEST_P(DeviceCollectives, GatherAndScatterAreThoseOfTheHost) {
  run_without_waits([&](DeviceRank& rank) {
    const int root = rank.size() - 1;
    for_each_length([&](at::ScalarType dtype, int64_t numel) {
      const at::Tensor block = numbers(numel, rank.id(), dtype);
      const at::Tensor blocks = rank.id() == root ? numbers(numel * rank.size(), 1, dtype) : at::Tensor();
      Comparison(rank, record())
          .check(blocks, block, [root](Group& group, const at::Tensor& output, const at::Tensor& input) {
            return group.gather(output, input, root);
          });
      Comparison(rank, record())
          .check(block, blocks, [root](Group& group, const at::Tensor& output, const at::Tensor& input) {
            return group.scatter(output, input, root);
          });
    });
  });
}

TEST_P(DeviceCollectives, MessagesThatCrossEachOtherArriveInTheirOrder) {
  for (const int size : {2, 3})
    run(size, [&](DeviceRank& rank) {
      const int next = (rank.id() + 1) % rank.size();
      const int previous = (rank.id() + rank.size() - 1) % rank.size();
      std::vector<Pending<void>> sent;
      for (const int64_t numel : {1, 30007, 0, 5})
        sent.push_back(rank.group().send(at::full({numel}, rank.id() + numel, rank.on_device(at::kInt)), next));
      for (const int64_t numel : {1, 30007, 0, 5}) {
        const at::Tensor got = at::zeros({numel}, rank.on_device(at::kInt));
        rank.group().recv(got, previous).wait();
        EXPECT_TRUE(got.cpu().equal(at::full({numel}, previous + numel, at::kInt)));
      }
      for (auto& each : sent) each.wait();
    });
}

TEST_P(DeviceCollectives, CountAndRecordWhatTheHostWould) {
  run(3, [](DeviceRank& rank) {
    const auto sent = [](Group& group, const std::function<void()>& call) {
      const CommCounters before = group.counters();
      call();
      EXPECT_EQ(group.counters().calls, before.calls + 1);
      return group.counters().bytes_sent - before.bytes_sent;
    };
    const at::Tensor host = at::ones({10});
    const at::Tensor device = at::ones({10}, rank.on_device());
    EXPECT_EQ(sent(rank.group(), [&] { rank.group().all_reduce(device).wait(); }),
              sent(rank.host(), [&] { rank.host().all_reduce(host).wait(); }));
    const std::string call = "all_reduce #1 (numel 10, float32 on fake, sum) at ";
    EXPECT_TRUE(testing::becomes_true(
        [&] { return line_of(rank.group().flight_record(), call).find(", took ") != std::string::npos; }));
    rank.group().all_reduce(host).wait();  // numbered with the group beneath
    rank.group().all_reduce(device).wait();
    EXPECT_NE(line_of(rank.group().flight_record(), "all_reduce #2 (numel 10, float32 on fake, sum) at "), "");
  });
}

TEST_P(DeviceCollectives, GoOnInGroupsThatAreSplit) {
  run(4, [](DeviceRank& rank) {
    auto first = rank.group().split({{0, 1}}, "half");
    auto second = rank.group().split({{2, 3}}, "half");
    EXPECT_EQ(first != nullptr, rank.id() < 2);
    EXPECT_EQ(second != nullptr, rank.id() >= 2);
    const auto half = std::move(first ? first : second);
    const at::Tensor tensor = at::full({5}, rank.id(), rank.on_device());
    half->all_reduce(tensor).wait();
    EXPECT_TRUE(tensor.cpu().equal(at::full({5}, rank.id() < 2 ? 1.0 : 5.0)));
    rank.group().all_reduce(tensor).wait();
    EXPECT_TRUE(tensor.cpu().equal(at::full({5}, 12.0)));
  });
}

TRIREME_ON_EVERY_TRANSPORT(DeviceCollectives);

}  // namespace
}  // namespace trireme
