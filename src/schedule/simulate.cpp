#include "trireme/schedule/simulate.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <sstream>

#include "schedule/run.h"

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
    std::ostringstream row;
    row << "stage " << std::left << std::setw(stage_width) << stage << ' ';
    for (const std::string& cell : cells) row << ' ' << std::setw(width) << cell;
    std::string line = row.str();
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
  }
  return text;
}

std::string to_svg(const Timeline& timeline, const std::string& title) {
  constexpr double kWidth = 1200, kRow = 28, kLeft = 70, kTop = 34;
  const double scale = timeline.makespan > 0 ? (kWidth - kLeft - 10) / timeline.makespan : 0;
  const double height = kTop + kRow * static_cast<double>(timeline.slots.size()) + 10;
  std::ostringstream svg;
  svg << std::fixed << std::setprecision(1);
  svg << "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" << kWidth << "\" height=\"" << height
      << "\" font-family=\"sans-serif\" font-size=\"11\">\n<text x=\"8\" y=\"20\" font-size=\"14\">" << title
      << "</text>\n";
  for (size_t stage = 0; stage < timeline.slots.size(); ++stage) {
    const double y = kTop + kRow * static_cast<double>(stage);
    svg << "<text x=\"8\" y=\"" << y + 17 << "\">stage " << stage << "</text>\n";
    for (const Slot& slot : timeline.slots[stage]) {
      const Kind kind = slot.instruction.kind;
      const char* colour = kind == Kind::kForward          ? "#8fb8de"
                           : kind == Kind::kBackwardWeight ? "#a5d6a7"
                           : kind == Kind::kBackwardInput  ? "#f2c14e"
                                                           : "#e39a7b";
      const double x = kLeft + slot.begin * scale, width = (slot.end - slot.begin) * scale;
      svg << "<rect x=\"" << x << "\" y=\"" << y << "\" width=\"" << width << "\" height=\"" << kRow - 4 << "\" fill=\""
          << colour << "\" stroke=\"#fff\"><title>" << to_text(slot.instruction) << ": " << slot.begin << " to "
          << slot.end << "</title></rect>\n";
      if (width > 12)
        svg << "<text x=\"" << x + width / 2 << "\" y=\"" << y + 16 << "\" text-anchor=\"middle\">"
            << slot.instruction.micro_batch << "</text>\n";
    }
  }
  svg << "</svg>\n";
  return svg.str();
}

}  // namespace trireme::pipeline
