// Where this rank's shard of a unit is kept while nobody uses it, and how it comes from there (ZeRO stage 3, kCopy).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "pager/weights/flat_buffers.h"
#include "pager/weights/store.h"
#include "trireme/device/stream.h"
#include "trireme/pager/storage/owned_slice.h"

namespace trireme {

class ShardHome : public SliceHome {
 public:
  /// Begins to bring the shard into `part` [shard_numel], of the unit's dtype or rounded to another one, on the current
  /// stream. Returns the memory that will have it: `part`, or the home's own.
  virtual at::Tensor read_into(const at::Tensor& part) = 0;
  /// Whether it comes beside the program, so that await_read() blocks until it is there. Else it is there for the
  /// stream.
  virtual bool reads_beside() const { return false; }
  virtual void await_read() {}

  /// The program has written elements [begin, begin + numel) of the shard into `part`, the shard's place in the unit
  /// while that is whole, from where all of the unit came.
  virtual void write(const at::Tensor& part, int64_t begin, int64_t numel) = 0;
  /// `part` goes, or the shard will be updated.
  virtual void keep_written() {}
  /// The shard will be updated, and nobody reads it. `written`: by the program, since the last time.
  virtual void begin_update(bool) {}

  /// The shard [shard_numel] for who updates it.
  virtual at::Tensor owned() const = 0;
  /// Blocks until the host may write owned().
  virtual void await_owned() {}
  virtual bool is_owned_there() const { return true; }
  /// owned() is final for this step; any thread where another one updates it.
  virtual void publish() {}
  /// All homes of this rank are published.
  virtual void settle() {}

  /// Bytes of the shard among those of weights in the parameters' memory.
  virtual int64_t weight_bytes() const { return 0; }
};

/// Whether the memory of the parameters' device has the shard of `unit`: its own, or a copy of the host's.
bool is_shard_on_device(const StoreContext& context, int unit);

/// A home whose values nobody has written yet. One on the device takes memory from `buffers`; one of which the host has
/// the truth sends that on `returns`.
std::unique_ptr<ShardHome> make_shard_home(const StoreContext& context, int unit, FlatBuffers& buffers,
                                           const SideStream& returns);

/// The place on disk of all units' shards; null where they are in memory. Throws IoError: the disk has no space.
std::unique_ptr<Extents> make_shard_extents(const Layout& layout, const DiskSpace& space);

/// make_shard_home() of a shard in `extents`.
std::unique_ptr<ShardHome> make_disk_home(const StoreContext& context, int unit);

}  // namespace trireme
