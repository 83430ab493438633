// The options of PYTORCH_CUDA_ALLOC_CONF that decide where a block goes. The parser checks the others (pinned
// memory, locking) and drops them, because they change no address and no size.
#pragma once
#include <array>
#include <cstdint>
#include <limits>
#include <string>

namespace maya {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kUnlimitedSplit = std::numeric_limits<int64_t>::max();

struct AllocatorSettings {
  std::string text;  // as the user wrote it
  int64_t large_segment_size = 20 * kMiB;
  int64_t max_split_size = kUnlimitedSplit;
  int64_t max_non_split_rounding = 20 * kMiB;
  double garbage_collection_threshold = 0;  // 0: never
  double per_process_memory_fraction = 1;
  bool expandable_segments = false;
  bool throw_on_cudamalloc_oom = false;
  // One for each power of two from 1 MiB to 32 GiB and above; 0 and 1: off.
  std::array<int64_t, 16> roundup_power2_divisions{};
};

}  // namespace maya
