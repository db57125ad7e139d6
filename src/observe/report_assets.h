// The style sheet and the script of the report page.
#pragma once

#include <string_view>

namespace trireme {

extern const std::string_view kReportStyle;
/// Draws the charts from the JSON in the element `data`; docs/observe.md describes it. Everything is set as text, never
/// as markup.
extern const std::string_view kReportScript;

}  // namespace trireme
