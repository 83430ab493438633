// expandable_segments:True. Each stream and pool reserves address space for more than the whole device and maps memory
// to it page by page (2 MiB in the small pool, large_segment_size in the large one). Blocks without memory are
// "unmapped"; free blocks can return whole pages to the driver.
#include <algorithm>

#include "allocator_state.h"

namespace maya {

namespace {

bool has_room(const Block* block, int64_t size) {
  int64_t room = 0;
  for (; room < size && block && block->is_idle(); block = block->next) room += block->size;
  return room >= size;
}

}  // namespace

// Finds the lowest address with enough room, free or unmapped, and reserves a new segment if there is none.
Block* CachingAllocator::State::find_expandable(const Request& request) {
  Pool& pool = *request.pool;
  for (auto it = pool.unmapped.lower_bound(request.stream);
       it != pool.unmapped.end() && (*it)->stream == request.stream; ++it) {
    Block* block = *it;
    if (block->prev && block->prev->is_idle()) block = block->prev;
    if (has_room(block, request.size)) return block;
  }
  const int64_t page = pool.is_small ? kSmallSegment : settings->large_segment_size;
  const int64_t size = (driver.total() + driver.total() / 8 + page - 1) / page * page;  // room to move pages to the end
  auto segment = std::make_unique<ExpandableSegment>(ExpandableSegment{driver.reserve_addresses(size), size, page});
  Block* block = blocks.make(request.stream, size, &pool, segment->address);
  block->mapped = false;
  block->expandable = segment.get();
  expandable_segments.push_back(std::move(segment));
  pool.unmapped.insert(block);
  return block;
}

Block* CachingAllocator::State::obtain_expandable(const Request& request, const Context& context) {
  Block* block = find_expandable(request);
  if (!block->mapped && !map(block, std::min(block->size, request.size), context)) return nullptr;
  while (block->size < request.size) {
    Block* next = block->next;  // unmapped; mapping it merges `block` into it
    if (!map(next, std::min(request.size - block->size, next->size), context)) return nullptr;
    block = next;
  }
  request.pool->remove(block);
  return block;
}

bool CachingAllocator::State::map(Block* block, int64_t size, const Context& context) {
  Pool& pool = *block->pool;
  const int64_t page = block->expandable->page;
  const int64_t mapped = (size + page - 1) / page * page;
  if (!driver.take(mapped)) return false;
  const uint64_t address = block->address;

  pool.unmapped.erase(block);
  block->mapped = true;
  if (mapped < block->size) {
    Block* rest = blocks.make(block->stream, block->size - mapped, &pool, address + mapped);
    rest->mapped = false;
    rest->expandable = block->expandable;
    rest->insert_between(block, block->next);
    pool.unmapped.insert(rest);
    block->size = mapped;
  }
  try_merge(block, block->prev);
  try_merge(block, block->next);
  pool.add(block);

  reserved_changed(pool, mapped);
  ++stats.num_device_alloc;
  report(MemoryAction::SegmentMap, address, mapped, block->stream, block->pool_id(), context);
  if (!block->prev && !block->segment_context) block->segment_context = context;
  return true;
}

// Unmaps the whole pages inside a free block; the rest at either end stays free.
void CachingAllocator::State::unmap(Block* block, const Context& context) {
  Pool& pool = *block->pool;
  const int64_t page = block->expandable->page;
  const int64_t offset = static_cast<int64_t>(block->address - block->expandable->address);
  const int64_t begin = (offset + page - 1) / page * page, end = (offset + block->size) / page * page;
  if (begin >= end) return;
  const int64_t head = begin - offset, unmapped = end - begin, tail = block->size - head - unmapped;
  const uint64_t address = block->address + head;

  pool.remove(block);
  auto keep = [&](int64_t size, uint64_t at, Block* before, Block* after) {
    if (size == 0) return;
    Block* part = blocks.make(block->stream, size, &pool, at);
    part->expandable = block->expandable;
    part->insert_between(before, after);
    pool.add(part);
  };
  keep(head, block->address, block->prev, block);
  keep(tail, address + unmapped, block, block->next);
  block->address = address;
  block->size = unmapped;
  block->mapped = false;
  try_merge(block, block->prev);
  try_merge(block, block->next);
  pool.unmapped.insert(block);

  driver.give_back(unmapped);
  reserved_changed(pool, -unmapped);
  if (pool.owner) --pool.owner->segments;
  ++stats.num_device_free;
  report(MemoryAction::SegmentUnmap, address, unmapped, block->stream, block->pool_id(),
         context ? context : block->segment_context);
}

void CachingAllocator::State::release_address_space(Block* block) {
  driver.release_addresses(block->expandable->address, block->expandable->size);
  block->pool->unmapped.erase(block);
  std::erase_if(expandable_segments, [&](auto& segment) { return segment.get() == block->expandable; });
  discard(block);
}

}  // namespace maya
