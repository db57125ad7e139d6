// Texts out of Parquet files, which Python's pyarrow reads in a process of its own.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace trireme {

/// Whether `file` begins as Parquet does, with bytes that no text has.
bool begins_as_parquet(std::span<const std::byte> file);

/// Whether `file` ends as Parquet does: a file that was cut short does not.
bool ends_as_parquet(std::span<const std::byte> file);

/// Parquet as texts. The process is started for the first file, reads the others too, and ends with the object.
class ParquetReader {
 public:
  /// `python` is the Python that is asked first; empty: TRIREME_PYTHON. The other one is `python3` of PATH.
  explicit ParquetReader(std::string python);
  ~ParquetReader();
  ParquetReader(const ParquetReader&) = delete;
  ParquetReader& operator=(const ParquetReader&) = delete;

  /// Gives the texts of `column` to `take`, row by row; empty ones are left out.
  ///
  /// Cost      a pass over the column; of it some rows are in memory at a time.
  /// Throws    DataError opening with `path`: no Python has pyarrow, with the way to get it; a column that is not there
  ///           or has no texts, with those that are there; a row that is null, no UTF-8, or has a NUL in it; what is
  ///           damaged, encrypted, or compressed in a way that pyarrow does not know; a reader that has died.
  void each_text(const std::string& path, const std::string& column, const std::function<void(std::string_view)>& take);

 private:
  class Process;

  std::unique_ptr<Process> started(const std::string& path) const;

  const std::string python_;
  std::unique_ptr<Process> process_;
};

}  // namespace trireme
