// What each collective moves over a wire, and what is folded where. Each runs in the thread of a CallQueue and returns
// when this rank's part is done.
#pragma once

#include <vector>

#include "comm/backends/c10d/link.h"

namespace trireme::comm {

void run_all_reduce(Link& link, const Request& request);
void run_reduce_scatter(Link& link, const Request& request);
void run_all_gather(Link& link, const Request& request);
void run_broadcast(Link& link, const Request& request);
void run_all_to_all(Link& link, const Request& request);
void run_gather(Link& link, const Request& request);
void run_scatter(Link& link, const Request& request);
/// Moves nothing: all ranks meet.
void run_barrier(Link& link, const Request& request);
/// The largest of the ranks' `own`, with the call of `request`.
int64_t run_agreement(Link& link, const Request& request, int64_t own);
void run_send(Link& link, const Request& request);
void run_recv(Link& link, const Request& request);

}  // namespace trireme::comm
