// The version of torch that the device is compiled for, and what torch's allocator does otherwise in some versions.
#pragma once
#include <torch/headeronly/version.h>

#define MAYA_TORCH_SINCE(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))
static_assert(MAYA_TORCH_SINCE(2, 10), "the emulated device needs torch 2.10 or later");

namespace maya {

// Among free blocks of one size, torch 2.12 prefers the one that was made first. Other versions prefer the lowest
// address. What is split off is made by the split; the rest of the block, and what it merges with, remain as old as it.
constexpr bool kOldestFreeBlockFirst = MAYA_TORCH_SINCE(2, 12) && !MAYA_TORCH_SINCE(2, 13);

}  // namespace maya
