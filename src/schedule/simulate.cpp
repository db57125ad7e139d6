#include "trireme/schedule/simulate.h"

#include <algorithm>
#include <cmath>

#include "schedule/run.h"
#include "trireme/base/format.h"

namespace trireme::pipeline {

Timeline simulate(const Schedule& schedule, const PartTimes& times) {
  check(schedule);
  return run(schedule, times, Waits::kReceives);
}

std::string to_text(const Timeline& timeline, double unit) {
  const auto columns = static_cast<size_t>(std::lround(std::ceil(timeline.makespan / unit)));
  const auto digits = [](size_t number) { return static_cast<int>(std::to_string(number).size()); };
  const int stage_width = digits(timeline.slots.size() - 1);
  int width = 3;
  for (const Slot& slot : timeline.slots.at(0))
    width = std::max(width, digits(static_cast<size_t>(slot.instruction.micro_batch)) + 1);
  std::string text;
  for (size_t stage = 0; stage < timeline.slots.size(); ++stage) {
    std::vector<std::string> cells(columns, ".");
    for (const Slot& slot : timeline.slots[stage]) {
      std::string cell = std::to_string(slot.instruction.micro_batch);
      if (slot.instruction.kind == Kind::kBackwardWeight)
        cell += '"';
      else if (slot.instruction.kind != Kind::kForward)
        cell += '\'';
      const auto begin = static_cast<size_t>(slot.begin / unit);
      const auto end = std::max(begin + 1, static_cast<size_t>(slot.end / unit));
      for (size_t column = begin; column < std::min(end, columns); ++column) cells[column] = cell;
    }
    std::string row = formatted("stage {:<{}} ", stage, stage_width);
    for (const std::string& cell : cells) row += formatted(" {:<{}}", cell, width);
    text += without_trailing_spaces(std::move(row)) + '\n';
  }
  return text;
}

std::string to_svg(const Timeline& timeline, const std::string& title) {
  constexpr double kWidth = 1200, kRow = 28, kLeft = 70, kTop = 34;
  const double scale = timeline.makespan > 0 ? (kWidth - kLeft - 10) / timeline.makespan : 0;
  const double height = kTop + kRow * static_cast<double>(timeline.slots.size()) + 10;
  std::string svg = formatted(
      R"(<svg xmlns="http://www.w3.org/2000/svg" width="{:.1f}" height="{:.1f}" font-family="sans-serif" font-size="11">
<text x="8" y="20" font-size="14">{}</text>
)",
      kWidth, height, title);
  for (size_t stage = 0; stage < timeline.slots.size(); ++stage) {
    const double y = kTop + kRow * static_cast<double>(stage);
    svg += formatted("<text x=\"8\" y=\"{:.1f}\">stage {}</text>\n", y + 17, stage);
    for (const Slot& slot : timeline.slots[stage]) {
      const Kind kind = slot.instruction.kind;
      const char* colour = kind == Kind::kForward          ? "#8fb8de"
                           : kind == Kind::kBackwardWeight ? "#a5d6a7"
                           : kind == Kind::kBackwardInput  ? "#f2c14e"
                                                           : "#e39a7b";
      const double x = kLeft + slot.begin * scale, width = (slot.end - slot.begin) * scale;
      svg += formatted(R"(<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" fill="{}" stroke="#fff">)", x, y,
                       width, kRow - 4, colour);
      svg += formatted("<title>{}: {:.1f} to {:.1f}</title></rect>\n", to_text(slot.instruction), slot.begin, slot.end);
      if (width > 12)
        svg += formatted("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">{}</text>\n", x + width / 2, y + 16,
                         slot.instruction.micro_batch);
    }
  }
  return svg + "</svg>\n";
}

}  // namespace trireme::pipeline
