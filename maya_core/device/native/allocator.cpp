// The life of a block: a request is rounded, served from a free block or a new segment, split, freed and merged again.
// Every step keeps the order of PyTorch's CUDACachingAllocator, because peaks depend on it.
#include "allocator.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "allocator_state.h"

namespace maya {

uint64_t address_of(const Block* block) { return block->address; }
int64_t size_of(const Block* block) { return block->size; }
int64_t requested_size_of(const Block* block) { return block->requested_size; }
StreamId stream_of(const Block* block) { return block->stream; }

Block* BlockStore::make(StreamId stream, int64_t size, Pool* pool, uint64_t address) {
  Block* block;
  if (unused_.empty()) {
    block = &all_.emplace_back();
  } else {
    block = unused_.back();
    unused_.pop_back();
    *block = Block{};
  }
  block->stream = stream;
  block->size = size;
  block->pool = pool;
  block->address = address;
  block->number = ++made_;
  return block;
}

void BlockStore::discard(Block* block) {
  block->context = nullptr;
  block->segment_context = nullptr;
  unused_.push_back(block);
}

namespace {

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

int64_t divisions_for(const AllocatorSettings& settings, int64_t size) {
  const int log2 = std::bit_width(static_cast<uint64_t>(size)) - 1;
  const int index = std::clamp(log2 - 20, 0, static_cast<int>(settings.roundup_power2_divisions.size()) - 1);
  return settings.roundup_power2_divisions[index];
}

// Rounds up to the next of `divisions` equal steps between two powers of two. `divisions` is a power of two itself.
int64_t round_to_division(int64_t size, int64_t divisions) {
  const uint64_t floor = std::bit_floor(static_cast<uint64_t>(size));
  if (floor == static_cast<uint64_t>(size)) return size;
  const int64_t step = static_cast<int64_t>(floor >> std::countr_zero(static_cast<uint64_t>(divisions)));
  return step == 0 ? static_cast<int64_t>(floor << 1) : round_up(size, step);
}

int64_t round_request(const AllocatorSettings& settings, int64_t bytes) {
  if (bytes < kBlockGranularity) return kBlockGranularity;
  const int64_t divisions = divisions_for(settings, bytes);
  if (divisions > 1 && bytes > kBlockGranularity * divisions) return round_to_division(bytes, divisions);
  return round_up(bytes, kBlockGranularity);
}

int64_t segment_size_for(const AllocatorSettings& settings, int64_t size) {
  if (size <= kLargestSmall) return kSmallSegment;
  if (size < kLargeSegmentBelow) return settings.large_segment_size;
  return round_up(size, kDriverGranularity);
}

// The size to which a free block of an expandable segment could grow. Best fit compares it, to keep growing one
// segment.
int64_t reachable_size(const Block* block) {
  return block->size + (block->next && !block->next->mapped ? block->next->size : 0);
}

void link_active(Block*& head, Block* block) {
  block->active_prev = nullptr;
  block->active_next = head;
  if (head) head->active_prev = block;
  head = block;
}

void unlink_active(Block*& head, Block* block) {
  if (block->active_prev) block->active_prev->active_next = block->active_next;
  else head = block->active_next;
  if (block->active_next) block->active_next->active_prev = block->active_prev;
  block->active_prev = block->active_next = nullptr;
}

bool listed(const std::vector<MempoolId>& ids, MempoolId id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

}  // namespace

CachingAllocator::State::State(int index, int64_t total, int64_t outside,
                               std::shared_ptr<const AllocatorSettings> given)
    : device(index),
      settings(std::move(given)),
      driver(index, total, outside),
      events(StreamHash{static_cast<uint64_t>(index)}) {
  stats.max_split_size = settings->max_split_size == kUnlimitedSplit ? -1 : settings->max_split_size;
  set_memory_fraction(settings->per_process_memory_fraction);
}

void CachingAllocator::State::set_memory_fraction(double fraction) {
  if (!(fraction >= 0 && fraction <= 1))
    throw std::invalid_argument("invalid fraction:" + std::to_string(fraction) + ". Please set within [0, 1].");
  allowed_bytes = fraction < 1 ? std::llround(fraction * static_cast<double>(driver.total())) : -1;
}

Block* CachingAllocator::State::allocate(int64_t bytes, StreamId stream, Context context) {
  if (!capturing()) complete_events(context);
  Request request = make_request(bytes, stream);
  if (!find_free(request)) {
    if (collects_garbage()) collect_garbage(context);
    const bool obtained =
        obtain_segment(request, false, context) || (!request.rejected && reclaim_and_obtain(request, context));
    if (!obtained) run_out(request, context);
  }
  return hand_out(request, std::move(context));
}

// The driver has no memory left: tries the ways to find some, the cheapest first.
bool CachingAllocator::State::reclaim_and_obtain(Request& request, const Context& context) {
  if (find_in_overflow_pools(request)) return true;
  if (release_oversize(request, context) && obtain_segment(request, false, context)) return true;
  if (capturing()) return false;
  release_cached(context, {0, 0});
  return obtain_segment(request, true, context);
}

Request CachingAllocator::State::make_request(int64_t bytes, StreamId stream) {
  const int64_t size = round_request(*settings, bytes);
  return {
      bytes, size, segment_size_for(*settings, size), stream, &pool_for(size, stream), settings->expandable_segments};
}

Pool& CachingAllocator::State::pool_for(int64_t size, StreamId stream) {
  const bool is_small = size <= kLargestSmall;
  for (auto route = routes.rbegin(); route != routes.rend(); ++route) {
    if (!route->second(stream)) continue;
    PrivatePool& pool = private_pool(route->first);
    return is_small ? pool.small : pool.large;
  }
  return is_small ? small : large;
}

bool CachingAllocator::State::find_free(Request& request) {
  Pool& pool = *request.pool;
  if (collects_garbage()) ++pool.searches;
  auto same_stream = [&](FreeBlocks::iterator it) {
    return it != pool.free.end() && it->block->stream == request.stream;
  };

  auto it = pool.first_fit(request.stream, request.size);
  if (!same_stream(it)) return false;
  if (it->block->expandable && request.expandable) {
    for (auto next = std::next(it);
         it->block->expandable && same_stream(next) && reachable_size(next->block) < reachable_size(it->block); ++next)
      it = next;
  } else if (it->block
                 ->expandable) {  // expandable segments were turned off in the meantime: only ordinary blocks qualify
    do ++it;
    while (same_stream(it) && it->block->expandable);
    if (!same_stream(it)) return false;
  }

  // An oversize block is never split, so it serves only requests that nearly fill it.
  const int64_t oversize = settings->max_split_size;
  if (request.size < oversize ? it->size >= oversize : it->size - request.size >= settings->max_non_split_rounding)
    return false;
  request.block = it->block;
  pool.free.erase(it);
  return true;
}

// Pools that opted in (MemPool(use_on_oom=True)) lend their free blocks before any segment is released.
bool CachingAllocator::State::find_in_overflow_pools(Request& request) {
  if (request.pool->owner) return false;
  for (auto& pool : overflow_pools) {
    auto found = private_pools.find(pool.key);
    if (found == private_pools.end()) continue;
    Request inside = request;
    inside.pool = request.pool->is_small ? &found->second->small : &found->second->large;
    inside.expandable = false;
    if (!find_free(inside)) continue;
    request = inside;
    return true;
  }
  return false;
}

bool CachingAllocator::State::obtain_segment(Request& request, bool is_retry, const Context& context) {
  const int64_t size = request.segment_size;
  if (is_retry) ++stats.num_alloc_retries;
  if (allowed_bytes >= 0 && allocated_from_driver + size > allowed_bytes) return false;
  if (settings->throw_on_cudamalloc_oom) {
    const auto limit =
        static_cast<int64_t>(settings->per_process_memory_fraction * static_cast<double>(driver.total()));
    if (allocated_from_driver + size > limit) {
      ++stats.num_oom_rejections;
      request.rejected = true;
      return false;
    }
  }
  PrivatePool* owner = request.pool->owner;
  if (request.expandable) {
    request.block = obtain_expandable(request, context);
    if (request.block && owner) ++owner->segments;
    return request.block;
  }
  if (!driver.take(round_up(size, kDriverGranularity))) return false;
  if (owner) ++owner->segments;
  request.block =
      blocks.make(request.stream, size, request.pool, driver.reserve_addresses(round_up(size, kDriverGranularity)));
  request.block->segment_context = context;
  increase(stats.segment, *request.pool, 1);
  reserved_changed(*request.pool, size);
  if (size >= settings->max_split_size) increase(stats.oversize_segments, 1);
  ++stats.num_device_alloc;
  report(MemoryAction::SegmentAlloc, request.block->address, size, request.stream, request.block->pool_id(), context);
  return true;
}

bool CachingAllocator::State::should_split(const Request& request) const {
  if (!unsplit_pools.empty() && listed(unsplit_pools, request.block->pool_id())) return false;
  const int64_t rest = request.block->size - request.size;
  if (request.block->pool->is_small || request.expandable) return rest >= kBlockGranularity;
  return request.size < settings->max_split_size && rest > kLargestSmall;
}

Block* CachingAllocator::State::hand_out(const Request& request, Context context) {
  Pool& pool = *request.pool;
  Block* block = request.block;
  const bool was_split = block->is_split();
  const bool counts_as_split = !block->expandable;  // pages of expandable segments can always be released
  if (should_split(request)) {
    Block* rest = block;
    block = blocks.make(request.stream, request.size, &pool, rest->address);
    block->expandable = rest->expandable;
    block->insert_between(rest->prev, rest);
    rest->address += request.size;
    rest->size -= request.size;
    pool.add(rest);
    if (counts_as_split && was_split) {
      decrease(stats.inactive_split_bytes, pool, block->size);
    } else if (counts_as_split) {
      increase(stats.inactive_split_bytes, pool, rest->size);
      increase(stats.inactive_split, pool, 1);
    }
  } else if (was_split && counts_as_split) {
    decrease(stats.inactive_split_bytes, pool, block->size);
    decrease(stats.inactive_split, pool, 1);
  }

  block->allocated = true;
  block->requested_size = request.bytes;
  block->context = std::move(context);
  report(MemoryAction::Alloc, block->address, request.bytes, block->stream, block->pool_id(), block->context);
  link_active(active, block);
  increase(stats.allocation, pool, 1);
  increase(stats.allocated_bytes, pool, block->size);
  increase(stats.active, pool, 1);
  increase(stats.active_bytes, pool, block->size);
  increase(stats.requested_bytes, pool, block->requested_size);
  if (block->size >= settings->max_split_size) increase(stats.oversize_allocations, 1);
  return block;
}

void CachingAllocator::State::free(Block* block, const Context& context) {
  block->allocated = false;
  decrease(stats.allocation, *block->pool, 1);
  decrease(stats.allocated_bytes, *block->pool, block->size);
  report(MemoryAction::FreeRequested, block->address, block->requested_size, block->stream, block->pool_id(),
         context ? context : block->context);
  if (block->size >= settings->max_split_size) decrease(stats.oversize_allocations, 1);
  if (block->used_by.empty()) return_to_pool(block, context);
  else if (capturing()) deferred.push_back(block);
  else await_streams(block);
}

void CachingAllocator::State::return_to_pool(Block* block, const Context& context) {
  Pool& pool = *block->pool;
  report(MemoryAction::FreeCompleted, block->address, block->requested_size, block->stream, block->pool_id(),
         context ? context : block->context);
  block->context = nullptr;
  const int64_t size = block->size, requested = block->requested_size;

  int64_t split_blocks = 0, split_bytes = 0;
  for (Block* neighbour : {block->prev, block->next}) {
    const int64_t merged = try_merge(block, neighbour);
    split_blocks -= merged > 0;
    split_bytes -= merged;
  }
  unlink_active(active, block);
  pool.add(block);
  if (block->is_split()) {
    split_blocks += 1;
    split_bytes += block->size;
  }
  if (!block->expandable) {
    change(stats.inactive_split, pool, split_blocks);
    change(stats.inactive_split_bytes, pool, split_bytes);
  }
  decrease(stats.active, pool, 1);
  decrease(stats.active_bytes, pool, size);
  decrease(stats.requested_bytes, pool, requested);
}

// Returns the size of the neighbour that became part of `into`, 0 if it is missing or in use.
int64_t CachingAllocator::State::try_merge(Block* into, Block* neighbour) {
  if (!neighbour || !neighbour->is_idle() || into->mapped != neighbour->mapped) return 0;
  Pool& pool = *into->pool;
  if (neighbour->mapped) pool.remove(neighbour);
  else pool.unmapped.erase(neighbour);
  if (into->prev == neighbour) {
    into->address = neighbour->address;
    into->prev = neighbour->prev;
    if (into->prev) into->prev->next = into;
    into->segment_context = std::move(neighbour->segment_context);
  } else {
    into->next = neighbour->next;
    if (into->next) into->next->prev = into;
  }
  const int64_t merged = neighbour->size;
  into->size += merged;
  discard(neighbour);
  return merged;
}

void CachingAllocator::State::discard(Block* block) {
  if (!used_by_in_capture.empty()) used_by_in_capture.erase(block);
  blocks.discard(block);
}

void CachingAllocator::State::record_stream(Block* block, StreamId stream) {
  if (stream == block->stream) return;  // work on the block's own stream is in order anyway
  auto add = [stream](std::vector<StreamId>& streams) {
    if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
  };
  add(block->used_by);
  if (capturing()) add(used_by_in_capture[block]);
}

PrivatePool& CachingAllocator::State::private_pool(MempoolId id) const {
  auto found = private_pools.find(id);
  if (found == private_pools.end()) {
    throw std::runtime_error("no private memory pool (" + std::to_string(id.first) + ", " + std::to_string(id.second) +
                             ") on this device");
  }
  return *found->second;
}

// The public interface, which takes the lock. Contexts are gathered outside the lock, because gathering may take
// others.

using Lock = std::unique_lock<std::recursive_mutex>;

CachingAllocator::CachingAllocator(int device, int64_t total_bytes, int64_t outside_bytes,
                                   std::shared_ptr<const AllocatorSettings> settings)
    : state_(std::make_unique<State>(device, total_bytes, outside_bytes, std::move(settings))) {}
CachingAllocator::~CachingAllocator() = default;

bool CachingAllocator::take_outside(int64_t bytes) {
  Lock lock(state_->mutex);
  return state_->driver.take_outside(bytes);
}

void CachingAllocator::configure(std::shared_ptr<const AllocatorSettings> settings) {
  Lock lock(state_->mutex);
  state_->settings = std::move(settings);
}

Block* CachingAllocator::allocate(int64_t bytes, StreamId stream) {
  constexpr int64_t exabyte = int64_t{1} << 60;
  if (bytes >= exabyte) throw OutOfMemory("CUDA out of memory. Tried to allocate more than 1EB memory.");
  Context context = state_->gather(false);
  Lock lock(state_->mutex);
  return state_->allocate(bytes, stream, std::move(context));
}

void CachingAllocator::free(Block* block) {
  const Context context = state_->gather(true);
  Lock lock(state_->mutex);
  state_->free(block, context);
}

void CachingAllocator::record_stream(Block* block, StreamId stream) {
  Lock lock(state_->mutex);
  state_->record_stream(block, stream);
}

void CachingAllocator::empty_cache(MempoolId pool) {
  const Context context = state_->gather(true);
  Lock lock(state_->mutex);
  state_->release_cached(context, pool);
}

void CachingAllocator::set_memory_fraction(double fraction) {
  Lock lock(state_->mutex);
  state_->set_memory_fraction(fraction);
}

double CachingAllocator::memory_fraction() const {
  Lock lock(state_->mutex);
  return state_->allowed_bytes < 0
             ? 1.0
             : static_cast<double>(state_->allowed_bytes) / static_cast<double>(state_->driver.total());
}

std::pair<int64_t, int64_t> CachingAllocator::memory_info() const {
  Lock lock(state_->mutex);
  return {state_->driver.free(), state_->driver.total()};
}

void CachingAllocator::create_or_keep_pool(MempoolId pool) {
  Lock lock(state_->mutex);
  auto& slot = state_->private_pools[pool];
  if (!slot) slot = std::make_unique<PrivatePool>(pool);
  else if (slot->users == 0) throw std::runtime_error("the private memory pool was released already");
  else ++slot->users;
}

void CachingAllocator::begin_allocate_to_pool(MempoolId pool, std::function<bool(StreamId)> filter) {
  Lock lock(state_->mutex);
  create_or_keep_pool(pool);
  for (auto& route : state_->routes) {
    if (route.first == pool) throw std::runtime_error("beginAllocateToPool: already recording to mempool_id");
  }
  state_->routes.emplace_back(pool, std::move(filter));
}

void CachingAllocator::end_allocate_to_pool(MempoolId pool) {
  Lock lock(state_->mutex);
  auto& routes = state_->routes;
  auto found = std::find_if(routes.begin(), routes.end(), [&](auto& route) { return route.first == pool; });
  if (found == routes.end()) throw std::runtime_error("endAllocatePool: not currently recording to mempool_id");
  routes.erase(found);
}

void CachingAllocator::release_pool(MempoolId pool) {
  Lock lock(state_->mutex);
  PrivatePool& released = state_->private_pool(pool);
  if (released.users == 0) throw std::runtime_error("the private memory pool was released already");
  if (--released.users == 0) state_->freeable_pools.push_back(pool);
}

int CachingAllocator::pool_use_count(MempoolId pool) const {
  Lock lock(state_->mutex);
  return state_->private_pool(pool).users;
}

void CachingAllocator::set_use_on_oom(MempoolId pool, bool use) {
  Lock lock(state_->mutex);
  if (use) state_->overflow_pools[pool] = true;
  else state_->overflow_pools.erase_key(pool);
}

void CachingAllocator::set_no_split(MempoolId pool) {
  Lock lock(state_->mutex);
  if (!listed(state_->unsplit_pools, pool)) state_->unsplit_pools.push_back(pool);
}

void CachingAllocator::capture_begins() {
  Lock lock(state_->mutex);
  ++state_->captures;
}

void CachingAllocator::capture_ends() {
  Lock lock(state_->mutex);
  if (state_->captures > 0) --state_->captures;
}

}  // namespace maya
