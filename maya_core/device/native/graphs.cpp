#include <atomic>

#include "device.h"
#include "timing.h"

namespace maya {
namespace {
std::atomic<int> captures{0};
std::atomic<uint32_t> next_graph{1};
struct Capture {
  size_t first_event;
  int64_t stream;
};
thread_local Capture capture;
}  // namespace

bool capturing() { return captures > 0; }

void begin_capture(Graph& graph, MempoolId pool) {
  TORCH_CHECK(graph.number == 0,
              "This CUDAGraph instance already owns a captured graph. To capture a new graph, create a new instance.");
  const int device = current_device();
  const auto stream = current_stream(device);
  TORCH_CHECK(stream != 0,
              "CUDA graphs must be captured on a non-default stream. (However, after capture, it's ok to replay them "
              "on the default stream.)");
  graph.device = device;
  graph.pool = pool;
  graph.holds_pool = true;
  allocator(device).begin_allocate_to_pool(pool, [stream](int64_t used) { return used == stream; });
  allocator(device).capture_begins();
  capture = {recorder().size(), stream};
  captures++;
}

void end_capture(Graph& graph) {
  captures--;
  allocator(graph.device).capture_ends();
  allocator(graph.device).end_allocate_to_pool(graph.pool);
  graph.work = recorder().cut_work(capture.first_event);
  graph.stream = recorder().stream_number(graph.device, capture.stream);
  graph.number = next_graph++;
}

void replay(const Graph& graph) {
  TORCH_CHECK(graph.number != 0, "Called CUDAGraph::replay without a preceding successful capture.");
  const auto stream = current_stream(graph.device);
  recorder().add(EventKind::GraphLaunch, graph.device, stream, graph.number, graph.work.size());
  const uint16_t here = recorder().stream_number(graph.device, stream);
  for (TraceEvent event : graph.work) {
    if (event.stream == graph.stream) event.stream = here;  // captured work is launched on the current stream
    recorder().append(event);
  }
  if (timing()) time_graph(graph.device, stream, graph.work);
}

void reset(Graph& graph) {
  if (graph.holds_pool && installed()) allocator(graph.device).release_pool(graph.pool);
  graph = {};
}

}  // namespace maya
