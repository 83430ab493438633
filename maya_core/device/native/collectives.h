// The emulated NCCL (and gloo): what ProcessGroupNCCL does to streams, events and memory, without anybody at the other
// end. A collective leaves its shapes at once; who else took part is found out when the ranks' traces are collated.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace maya {

// One call on a communicator, as the trace's table of calls holds it. Ranks are the communicator's own.
struct CollectiveCall {
  uint32_t communicator;
  std::string op;
  std::string dtype;
  int64_t elements_in = 0, elements_out = 0;  // given and received by this rank
  int64_t peer = -1;                          // root, source or destination
  std::string reduction;
  std::vector<int64_t> splits_in, splits_out; // of an uneven exchange, in elements
};

// The Python side (maya_core/collectives): tables, call stacks and the values that ranks give one another.
struct CollectiveSide {
  using Settle = std::function<void()>;
  virtual ~CollectiveSide() = default;
  virtual uint32_t communicator(const std::string& backend, const std::string& name, const std::vector<int64_t>& ranks, int rank) = 0;
  virtual std::pair<uint32_t, int64_t> note(const CollectiveCall& call) = 0;  // its number and its call site's
  // Gives this rank's values to the others; the result, if any, waits for theirs and leaves them in `outputs`.
  virtual Settle exchange(const CollectiveCall& call, int64_t sequence, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs) = 0;
  virtual void meet(int64_t global_rank) = 0;  // a point-to-point message goes to or comes from that rank
};
void set_collective_side(std::unique_ptr<CollectiveSide> side);
CollectiveSide* collective_side();

}  // namespace maya
