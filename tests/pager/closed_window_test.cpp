// An accumulation window between its end and the next one's beginning has one order of calls.
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/pager/pager.h"

namespace trireme {
namespace {

using namespace testing;

struct Fixture {
  explicit Fixture(Rank& rank) : pager(rank.world(), {{"w", weight}}, {}) { weight.sum().backward(); }
  at::Tensor weight = at::ones({3}).requires_grad_();
  Pager pager;
};

TEST(AClosedWindow, IsNotUpdatedBeforePeersHaveClosedTheirs) {
  run_ranks(1, [](Rank& rank) {
    Fixture fixture(rank);
    ClosedWindow window = fixture.pager.close_window();
    for (const std::string& text :
         {error_of<StateError>([&] { window.publish(0); }), error_of<StateError>([&] { window.defer_publish(0); }),
          error_of<StateError>([&] { window.open(); })})
      EXPECT_SAYS(text, "peers may still read the weights; call meet() or begin_update() before it");
    window.meet();
    window.publish(0);
    window.open();
  });
}

TEST(AClosedWindow, IsOpenedOnce) {
  run_ranks(1, [](Rank& rank) {
    Fixture fixture(rank);
    ClosedWindow window = fixture.pager.close_window();
    window.meet();
    EXPECT_SAYS(error_of<StateError>([&] { window.meet(); }), "meet: the window is behind that");
    window.abandon();
    EXPECT_SAYS(error_of<StateError>([&] { window.open(); }), "open: the window is behind that");
    EXPECT_SAYS(error_of<StateError>([&] { window.publish(0); }), "publish: the window is behind that");
  });
}

TEST(AClosedWindow, ThatDiesBeforeItsEndIsToldByTheNextCall) {
  run_ranks(1, [](Rank& rank) {
    Fixture fixture(rank);
    {
      ClosedWindow window = fixture.pager.close_window();
      const ClosedWindow moved = std::move(window);
    }
    for (const std::string& text : {error_of<StateError>([&] { (void)fixture.pager.close_window(); }),
                                    error_of<StateError>([&] { (void)fixture.pager.settle_writes(); }),
                                    error_of<StateError>([&] { fixture.pager.end_backward(); }),
                                    error_of<StateError>([&] { fixture.pager.reduce_now(); })})
      EXPECT_SAYS(text, "the step before ended between close_window() and open()");
  });
}

TEST(AClosedWindow, HasThisRanksPartOfTheSquares) {
  for (int stage = 0; stage < 4; ++stage)
    run_ranks(2, [&](Rank& rank) {
      at::Tensor weight = at::ones({64}).requires_grad_();
      Pager pager(rank.world(), {{"w", weight}}, {.stage = stage});
      (2 * weight.sum()).backward();
      ClosedWindow window = pager.close_window();
      EXPECT_EQ(window.squares().total(), 4 * 32) << stage;  // of its half, at ZeRO stage 0 too
      window.meet();
      window.publish(0);
      window.open();
    });
}

}  // namespace
}  // namespace trireme
