#include "pager/gradients/gradient_board.h"

namespace trireme {

GradientBoard::GradientBoard(MemorySharing& sharing, int parameters) {
  const auto aligned = [](size_t bytes) { return (bytes + 63) / 64 * 64; };
  folded_begin_ = kHeader + aligned(sizeof(Slot) * parameters);
  announced_begin_ = folded_begin_ + aligned(sizeof(std::atomic<uint64_t>) * parameters);
  memory_ = sharing.share(announced_begin_ + aligned(sizeof(std::atomic<uint32_t>) * parameters),
                          MemorySharing::Share::kEach);
}

}  // namespace trireme
