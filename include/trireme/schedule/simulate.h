// How long a schedule takes, by the times of its parts.
#pragma once

#include <string>
#include <vector>

#include "trireme/schedule/schedule.h"

namespace trireme::pipeline {

/// Times of one part of the model and one micro-batch, in any one unit. A whole backward takes input plus weight.
struct PartTimes {
  double forward = 1;
  double backward_input = 1;
  double backward_weight = 1;
  double message = 0;                ///< from the send to when the peer can receive it
  std::vector<double> of_part = {};  ///< by part: how many times as long its computations are; empty: once
};

/// One computation.
struct Slot {
  Instruction instruction;
  double begin = 0;
  double end = 0;
};

/// The result of simulate().
struct Timeline {
  std::vector<std::vector<Slot>> slots;  ///< by stage, in order
  double makespan = 0;                   ///< until the last stage has computed its last gradient
  /// Share of stages * makespan in which a stage does not compute.
  double bubble_share = 0;
  /// By stage: the most forwards, of all its chunks, whose backward was not complete yet.
  std::vector<int> peak_activations;
};

/// Throws    ConfigError, as check().
Timeline simulate(const Schedule& schedule, const PartTimes& times = {});

/// One row per stage, one column per `unit` of time: the micro-batch where a forward runs ("3"), a backward ("3'"), its
/// half for weights ("3\""), with "." for idle columns.
std::string to_text(const Timeline& timeline, double unit = 1);
/// A drawing [SVG], one bar per computation.
std::string to_svg(const Timeline& timeline, const std::string& title);

}  // namespace trireme::pipeline
