// Bubbles and memory of the published schedules.
#include "trireme/schedule/simulate.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace trireme::pipeline {
namespace {

double share(double bubble, double work) { return bubble / (work + bubble); }

TEST(Simulation, BubblesOfOneForwardOneBackwardAndGPipe) {
  for (int p = 1; p <= 8; ++p)
    for (int m = p; m <= 24; m += 3) {
      const PartTimes times{.forward = 1, .backward_input = 1.2, .backward_weight = 0.8};
      EXPECT_NEAR(simulate(one_f_one_b(p, m), times).bubble_share, share(p - 1, m), 1e-9) << p << ", " << m;
      EXPECT_NEAR(simulate(gpipe(p, m), times).bubble_share, share(p - 1, m), 1e-9);
    }
}

TEST(Simulation, InterleavingDividesTheBubbleByTheChunks) {
  for (int p = 2; p <= 8; ++p)
    for (const int v : {2, 3, 4})
      EXPECT_NEAR(simulate(interleaved(p, 3 * p, v)).bubble_share, share(p - 1, v * 3 * p), 1e-9) << p << ", " << v;
}

TEST(Simulation, ZeroBubbleH1HasTheBubbleAndTheMemoryOfItsPaper) {
  for (int p = 2; p <= 8; ++p) {
    const int m = 3 * p;
    const Timeline timeline = simulate(zero_bubble_h1(p, m));
    EXPECT_NEAR(timeline.bubble_share, share(p - 1, 3 * m), 1e-9);  // (p - 1)(F + B - W)
    for (const int peak : timeline.peak_activations) EXPECT_EQ(peak, p);
  }
}

/// Times that were measured in milliseconds, and the bubble rates that follow: arXiv:2401.10241, tables 4 and 5.
TEST(Simulation, ZeroBubbleH1AtThePapersTimes) {
  const PartTimes times{.forward = 18.522, .backward_input = 18.086, .backward_weight = 9.337, .message = 0.601};
  EXPECT_NEAR(simulate(zero_bubble_h1(8, 24), times).bubble_share, 0.1585, 0.1 * 0.1585);
  EXPECT_NEAR(simulate(zero_bubble_h1(8, 32), times).bubble_share, 0.1242, 0.1 * 0.1242);
  EXPECT_NEAR(simulate(zero_bubble_h1(8, 64), times).bubble_share, 0.0674, 0.1 * 0.0674);
  EXPECT_NEAR(simulate(one_f_one_b(8, 24), times).bubble_share, 0.2431, 0.1 * 0.2431);
}

TEST(Simulation, VSchedulesIdleOnlyWhileThePipelineFills) {
  for (int p = 2; p <= 8; ++p) {
    const int m = 3 * p;
    // Every stage's own slots follow each other without a gap once it has begun: what is left is the way of the first
    // micro-batch, p - 1 parts, and of the last gradient.
    const Timeline zb = simulate(zero_bubble_v(p, m));
    EXPECT_NEAR(zb.bubble_share, share(p - 1, 6 * m), 1e-9);
    for (const int peak : zb.peak_activations) EXPECT_LE(peak, 2 * p);  // of half the size: 1F1B's first stage
    const Timeline dual = simulate(dual_pipe_v(p, m));
    EXPECT_NEAR(dual.bubble_share, share(p - 1, 6 * m), 1e-9);
    for (const int peak : dual.peak_activations) EXPECT_LE(peak, 2 * p + 1);
  }
}

/// The longest time in which a stage does not compute, from its first computation to its last, as the papers measure
/// bubbles: the step of the optimizer need not wait for other stages.
double longest_bubble(const Timeline& timeline) {
  double longest = 0;
  for (const std::vector<Slot>& slots : timeline.slots) {
    double idle = slots.back().end - slots.front().begin;
    for (const Slot& slot : slots) idle -= slot.end - slot.begin;
    longest = std::max(longest, idle);
  }
  return longest;
}

/// arXiv:2401.10241, sections 2.3 and 6, where T_F, T_B and T_W are a micro-batch's forward and the gradients of its
/// inputs and weights on one stage: ZB-H1 has (p - 1)(T_F + T_B - T_W), and ZB-V none where the three are equal.
TEST(Simulation, BubblesOfZeroBubbleSchedulesAreTheClosedFormsOfTheirPaper) {
  for (int p = 2; p <= 8; ++p)
    for (const int m : {2 * p, 3 * p, 8 * p}) {
      EXPECT_LE(longest_bubble(simulate(zero_bubble_h1(p, m))), p - 1 + 1e-9) << p << ", " << m;
      EXPECT_NEAR(longest_bubble(simulate(zero_bubble_v(p, m))), 0, 1e-9) << p << ", " << m;
    }
}

/// DeepSeek's DualPipe, whose table gives (P / 2 - 1)(F&B + B - 3W) for P = 2p parts, B a whole backward and F&B a
/// forward and a backward that overlap: here they follow each other, F&B = F + B.
TEST(Simulation, DualPipeVIdlesNoLongerThanItsAuthorsSay) {
  for (int p = 2; p <= 8; ++p)
    for (const PartTimes& times : {PartTimes{1, 1, 1}, PartTimes{1, 1.2, 0.8}, PartTimes{1, 1, 0.5},
                                   PartTimes{1, 1.5, 1}, PartTimes{1, 0.8, 1.2}}) {
      const double backward = times.backward_input + times.backward_weight;
      const double papers = (p - 1) * (times.forward + 2 * backward - 3 * times.backward_weight);
      EXPECT_LE(longest_bubble(simulate(dual_pipe_v(p, 3 * p), times)), papers + 1e-9) << p;
      // ZB-V, of the same parts, is between none and that of ZB-H1 with parts twice as long.
      const PartTimes whole{2 * times.forward, 2 * times.backward_input, 2 * times.backward_weight};
      EXPECT_LE(longest_bubble(simulate(zero_bubble_v(p, 3 * p), times)),
                longest_bubble(simulate(zero_bubble_h1(p, 3 * p), whole)) + 1e-9)
          << p;
    }
}

TEST(Simulation, MessagesTakeTheirTimeBesideTheComputation) {
  const Timeline timeline = simulate(one_f_one_b(2, 1), {.message = 0.5});
  // F, message, F, B of both halves, message, B.
  EXPECT_DOUBLE_EQ(timeline.makespan, 1 + 0.5 + 1 + 2 + 0.5 + 2);
}

TEST(Timelines, AsText) {
  EXPECT_EQ(to_text(simulate(one_f_one_b(2, 2), {.backward_input = 0.5, .backward_weight = 0.5})),
            "stage 0  0   1   .   0'  .   1'\n"
            "stage 1  .   0   0'  1   1'  .\n");
}

TEST(Timelines, AsADrawingHaveABarForEachComputation) {
  const std::string svg = to_svg(simulate(zero_bubble_h1(2, 3)), "ZB-H1");
  size_t bars = 0;
  for (size_t at = svg.find("<rect"); at != std::string::npos; at = svg.find("<rect", at + 1)) ++bars;
  EXPECT_EQ(bars, 2u * 3 * 3);
  EXPECT_EQ(svg.substr(svg.size() - 7), "</svg>\n");
}

}  // namespace
}  // namespace trireme::pipeline
