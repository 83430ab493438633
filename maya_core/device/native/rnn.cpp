// nn.LSTM, nn.GRU and nn.RNN on cuDNN: does with the weights what aten/native/cudnn/RNN.cpp does before it calls the
// op.
#include <ATen/native/RNN.h>
#include <ATen/ops/_cudnn_rnn.h>

#include "kernels.h"

namespace maya {
namespace {

using at::Tensor;
using at::TensorList;
enum Mode { Relu = 0, Tanh = 1, Lstm = 2, Gru = 3 };  // cudnnRNNMode_t

struct Run {
  Tensor output, hidden, cell;
};

Run run(Mode mode, const Tensor& input, const Tensor& batch_sizes, const Tensor& hidden, const Tensor& cell,
        TensorList weights, bool has_biases, int64_t layers, double dropout, bool train, bool bidirectional,
        bool batch_first) {
  const int64_t hidden_size = cell.defined() ? cell.size(2) : hidden.size(2);
  const int64_t projection = cell.defined() && hidden.size(2) != cell.size(2) ? hidden.size(2) : 0;
  const int64_t per_layer = (has_biases ? 4 : 2) + (projection ? 1 : 0);
  std::vector<int64_t> sizes;
  if (batch_sizes.defined()) {
    auto* each = batch_sizes.data_ptr<int64_t>();
    sizes.assign(each, each + batch_sizes.numel());
  }
  auto [output, hy, cy, reserve, weight_buf] = at::_cudnn_rnn(
      input, weights, per_layer, std::nullopt, hidden, cell.defined() ? std::optional(cell) : std::nullopt, mode,
      hidden_size, projection, layers, batch_first, dropout, train, bidirectional, sizes, std::nullopt);
  return {output, hy, cy};
}

void lstm(Tensor& output, Tensor& hy, Tensor& cy, const Tensor& input, TensorList hx, TensorList weights,
          bool has_biases, int64_t layers, double dropout, bool train, bool bidirectional, bool batch_first) {
  auto done =
      run(Lstm, input, {}, hx[0], hx[1], weights, has_biases, layers, dropout, train, bidirectional, batch_first);
  output = done.output, hy = done.hidden, cy = done.cell;
}
void lstm_packed(Tensor& output, Tensor& hy, Tensor& cy, const Tensor& data, const Tensor& batch_sizes, TensorList hx,
                 TensorList weights, bool has_biases, int64_t layers, double dropout, bool train, bool bidirectional) {
  auto done =
      run(Lstm, data, batch_sizes, hx[0], hx[1], weights, has_biases, layers, dropout, train, bidirectional, false);
  output = done.output, hy = done.hidden, cy = done.cell;
}
template <Mode mode>
void rnn(Tensor& output, Tensor& hy, const Tensor& input, const Tensor& hx, TensorList weights, bool has_biases,
         int64_t layers, double dropout, bool train, bool bidirectional, bool batch_first) {
  auto done = run(mode, input, {}, hx, {}, weights, has_biases, layers, dropout, train, bidirectional, batch_first);
  output = done.output, hy = done.hidden;
}
template <Mode mode>
void rnn_packed(Tensor& output, Tensor& hy, const Tensor& data, const Tensor& batch_sizes, const Tensor& hx,
                TensorList weights, bool has_biases, int64_t layers, double dropout, bool train, bool bidirectional) {
  auto done = run(mode, data, batch_sizes, hx, {}, weights, has_biases, layers, dropout, train, bidirectional, false);
  output = done.output, hy = done.hidden;
}

}  // namespace

void register_rnn_stubs(torch_abi::ReplacedStubs& stubs) {
  using namespace at::native;
  stubs.set(lstm_cudnn_stub, &lstm);
  stubs.set(lstm_packed_cudnn_stub, &lstm_packed);
  stubs.set(gru_cudnn_stub, &rnn<Gru>);
  stubs.set(gru_packed_cudnn_stub, &rnn_packed<Gru>);
  stubs.set(rnn_tanh_cudnn_stub, &rnn<Tanh>);
  stubs.set(rnn_tanh_packed_cudnn_stub, &rnn_packed<Tanh>);
  stubs.set(rnn_relu_cudnn_stub, &rnn<Relu>);
  stubs.set(rnn_relu_packed_cudnn_stub, &rnn_packed<Relu>);
}

}  // namespace maya
