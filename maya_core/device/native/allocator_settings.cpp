#include "allocator_settings.h"

#include <algorithm>
#include <bit>
#include <cctype>
#include <memory>
#include <stdexcept>
#include <vector>

#include "allocator.h"

namespace maya {
namespace {

[[noreturn]] void reject(const std::string& why) { throw std::invalid_argument(why); }

// Reads "key:value,key:[a:b,c:d]" one token at a time. Blanks are skipped; each of , : [ ] is a token.
class ConfReader {
 public:
  explicit ConfReader(const std::string& conf) {
    std::string word;
    auto flush = [&] {
      if (!word.empty()) tokens_.push_back(std::move(word)), word.clear();
    };
    for (char c : conf) {
      if (c == ',' || c == ':' || c == '[' || c == ']') flush(), tokens_.emplace_back(1, c);
      else if (!std::isspace(static_cast<unsigned char>(c))) word += c;
    }
    flush();
  }

  bool done() const { return at_ == tokens_.size(); }
  bool next_is(const char* token) const { return !done() && tokens_[at_] == token; }
  void skip() { ++at_; }

  std::string word(const std::string& what) {
    if (done()) reject("Error parsing allocator config: expected " + what + " but the text ends");
    return tokens_[at_++];
  }
  void expect(const char* token, const std::string& after) {
    if (!next_is(token)) {
      const std::string found = done() ? "" : " but got '" + tokens_[at_] + "'";
      reject("Error parsing allocator config: expected '" + std::string(token) + "' after '" + after + "'" + found);
    }
    ++at_;
  }
  int64_t count(const std::string& key) {
    const std::string text = word("a number for " + key);
    const bool digits = !text.empty() && text.size() < 19 &&
                        std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isdigit(c); });
    if (!digits) reject("Error, expecting a whole number for " + key + " but got '" + text + "'");
    return std::stoll(text);
  }
  double fraction(const std::string& key) {
    const std::string text = word("a number for " + key);
    size_t used = 0;
    double value = 0;
    try {
      value = std::stod(text, &used);
    } catch (const std::exception&) { used = 0; }
    if (used == 0 || used != text.size()) reject("Error, expecting a number for " + key + " but got '" + text + "'");
    return value;
  }
  bool flag(const std::string& key) {
    const std::string text = word("'True' or 'False' for " + key);
    if (text != "True" && text != "False") reject("Expected 'True' or 'False' for " + key + " but got '" + text + "'");
    return text == "True";
  }

 private:
  std::vector<std::string> tokens_;
  size_t at_ = 0;
};

bool is_power_of_two(int64_t n) { return n > 0 && std::has_single_bit(static_cast<uint64_t>(n)); }
size_t log2_floor(int64_t n) { return std::bit_width(static_cast<uint64_t>(n)) - 1; }

int64_t read_mib(ConfReader& in, const std::string& key, int64_t at_least) {
  const int64_t mib = in.count(key);
  if (mib < at_least) reject("CachingAllocator option " + key + " too small, must be >= " + std::to_string(at_least));
  return std::min(mib, kUnlimitedSplit / kMiB) * kMiB;
}

// "[256:1,512:2,>:4]": the first entry also applies to all smaller sizes, ">" to all sizes above the last boundary.
void read_division_list(ConfReader& in, std::array<int64_t, 16>& divisions) {
  bool first = true;
  size_t last = 0;
  while (!in.next_is("]")) {
    const bool rest = in.next_is(">");
    const int64_t boundary = rest ? (in.skip(), 0) : in.count("a roundup_power2_divisions interval");
    in.expect(":", rest ? ">" : std::to_string(boundary));
    const int64_t value = in.count("roundup_power2_divisions");
    if (value != 0 && !is_power_of_two(value))
      reject("For roundups, the divisions has to be power of 2 or 0 to disable roundup ");
    if (rest) {
      std::fill(divisions.begin() + last + 1, divisions.end(), value);
    } else {
      if (!is_power_of_two(boundary)) reject("For roundups, the intervals have to be power of 2 ");
      last = std::min(log2_floor(boundary), divisions.size() - 1);
      if (first) std::fill(divisions.begin(), divisions.begin() + last, value);
      divisions[last] = value;
      first = false;
    }
    if (!in.next_is("]")) in.expect(",", std::to_string(value));
  }
  in.skip();
}

void read_divisions(ConfReader& in, std::array<int64_t, 16>& divisions) {
  if (in.next_is("[")) {
    in.skip();
    read_division_list(in, divisions);
    return;
  }
  const int64_t value = in.count("roundup_power2_divisions");
  if (!is_power_of_two(value)) reject("For roundups, the divisions has to be power of 2 ");
  divisions.fill(value);
}

void read_backend(ConfReader& in) {
  const std::string backend = in.word("an allocator backend");
  if (backend == "cudaMallocAsync")
    reject("PYTORCH_CUDA_ALLOC_CONF backend:cudaMallocAsync is not emulated, only backend:native is");
  if (backend != "native") reject("Unknown allocator backend, options are native and cudaMallocAsync");
}

void read_register_threads(ConfReader& in, const std::string& key) {
  const int64_t threads = in.count(key);
  if (!is_power_of_two(threads))
    reject("Number of register threads has to be power of 2, got " + std::to_string(threads));
  if (threads > 128)
    reject("Number of register threads should be less than or equal to 128, got " + std::to_string(threads));
}

void read_option(ConfReader& in, const std::string& key, AllocatorSettings& to) {
  const int64_t large_mib = to.large_segment_size / kMiB;
  if (key == "large_segment_size_mb") in.count(key);  // read before the others, which depend on it
  else if (key == "max_split_size_mb") to.max_split_size = read_mib(in, key, large_mib);
  else if (key == "max_non_split_rounding_mb") to.max_non_split_rounding = read_mib(in, key, large_mib);
  else if (key == "garbage_collection_threshold") {
    to.garbage_collection_threshold = in.fraction(key);
    const double threshold = to.garbage_collection_threshold;
    if (!(threshold > 0 && threshold < 1)) reject("garbage_collect_threshold is invalid, set it in (0.0, 1.0)");
  } else if (key == "per_process_memory_fraction") {
    to.per_process_memory_fraction = in.fraction(key);
    const double fraction = to.per_process_memory_fraction;
    if (!(fraction >= 0 && fraction <= 1)) reject("per_process_memory_fraction is invalid, set it in [0.0, 1.0]");
  } else if (key == "roundup_power2_divisions") read_divisions(in, to.roundup_power2_divisions);
  else if (key == "expandable_segments") to.expandable_segments = in.flag(key);
  else if (key == "throw_on_cudamalloc_oom") to.throw_on_cudamalloc_oom = in.flag(key);
  else if (key == "backend") read_backend(in);
  else if (key == "pinned_num_register_threads") read_register_threads(in, key);
  else if (key == "pinned_reserve_segment_size_mb") {
    if (in.count(key) == 0) reject("Pinned reserve segment size has to be greater than 0");
  } else if (key == "pinned_max_round_threshold_mb" || key == "pinned_max_cached_size_mb") in.count(key);
  else if (key == "release_lock_on_cudamalloc" || key == "release_lock_on_hipmalloc" ||
           key == "pinned_use_cuda_host_register" || key == "pinned_use_hip_host_register" ||
           key == "pinned_use_background_threads" || key == "pinned_free_catch_all" ||
           key == "graph_capture_record_stream_reuse")
    in.flag(key);
  else reject("Unrecognized key '" + key + "' in Accelerator allocator config.");
}

// max_split_size_mb and max_non_split_rounding_mb are checked against it, wherever in the text it is.
void read_large_segment_size(const std::string& conf, AllocatorSettings& to) {
  for (ConfReader in(conf); !in.done();) {
    if (in.word("a key") != "large_segment_size_mb") continue;
    in.expect(":", "large_segment_size_mb");
    const int64_t mib = in.count("large_segment_size_mb");
    if (mib <= 10) reject("CachingAllocator option large_segment_size_mb must be > 10 MB");
    to.large_segment_size = mib * kMiB;
  }
  to.max_non_split_rounding = to.large_segment_size;
}

}  // namespace

std::shared_ptr<const AllocatorSettings> parse_allocator_settings(const std::string& conf,
                                                                  const AllocatorSettings* previous) {
  auto settings = std::make_shared<AllocatorSettings>();
  if (previous) {  // PyTorch resets the split, rounding and collection options with every new text, and keeps the
                   // others
    settings->large_segment_size = previous->large_segment_size;
    settings->per_process_memory_fraction = previous->per_process_memory_fraction;
    settings->expandable_segments = previous->expandable_segments;
    settings->throw_on_cudamalloc_oom = previous->throw_on_cudamalloc_oom;
  }
  settings->text = conf;
  read_large_segment_size(conf, *settings);
  ConfReader in(conf);
  while (!in.done()) {
    const std::string key = in.word("a key");
    if (key == "," || key == ":" || key == "[" || key == "]")
      reject("Error parsing allocator config: expected a key but got '" + key + "'");
    in.expect(":", key);
    read_option(in, key, *settings);
    if (!in.done()) in.expect(",", "the value of " + key);
  }
  return settings;
}

}  // namespace maya
