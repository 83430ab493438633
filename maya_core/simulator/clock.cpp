// The clock of a job: computes when the hosts, streams, events, copy engines and collectives of all ranks do their
// work, given how long each piece of work takes alone.
//
// A rank's host issues its items in order and runs ahead of its GPU until something makes it wait. A lane is a CUDA
// stream, which is a queue of items. A running item is one of three things. Compute shares its GPU with other compute
// there and is slowed by communication beside it. Copies run one at a time for each direction and GPU. A meeting is a
// collective or message: it begins when its lane reaches it, moves data once all members have arrived, and shares its
// links with other meetings. Input and output are plain arrays; clock.py has the same names.

#include <algorithm>
#include <cstdint>
#include <queue>
#include <utility>
#include <vector>

namespace {

enum Kind : uint8_t {
  kCompute,
  kCopyIn,
  kCopyOut,
  kMeet,
  kRecord,
  kWait,
  kHostEvent,
  kHostLane,
  kHostDevice,
  kHostMeet,
  kMark
};

constexpr double kSlowest = 0.05;  // compute never stops completely
constexpr int32_t kNone = -1;
constexpr uint8_t kUnshared = 2;  // the link

}  // namespace

extern "C" {

struct Job {
  int64_t items, ranks, lanes, devices, events, meetings;
  int64_t queue;  // items that a lane accepts before its host has to wait
  // By item.
  const uint8_t* kind;
  const int32_t* lane;        // of host items: the lane waited for
  const int32_t* subject;     // event, or device waited for
  const double* host_s;       // the host's own time before it is issued
  const double* work_s;       // of compute and copies that run alone
  const int64_t* first_part;  // items + 1 long: the meetings of a kMeet
  // By part.
  const int32_t* meeting;
  const uint8_t* waits;  // 0: a message that does not wait for its receiver
  // By rank, lane, meeting.
  const int64_t* first_item;  // ranks + 1
  const int32_t* device_of;   // by lane
  const int32_t* members;
  const double* meeting_s;
  const double* pressure;  // share of compute that is lost beside it
  const uint8_t* link;     // 0: within the node, 1: between nodes, 2: shared with nobody
};

struct Result {
  double* issued;  // by item: when the host issued it, when it began, when its data moved, when it was over
  double* began;
  double* met;
  double* over;
  double* host_over;  // by rank
};
}

namespace {

struct Lane {
  int64_t head = kNone, tail = kNone;
  bool busy = false;  // its head runs or waits, or a moment to look at it is foreseen
  double left = 0;    // of the running compute: remaining work, its rate, and since when
  double rate = 0, since = 0;
  uint32_t stamp = 0;
  int64_t queued = 0;
  int32_t host = kNone;  // the host that waits until the queue is shorter
};

struct Meeting {
  int32_t arrived = 0;
  double left = 0, rate = 0, since = 0;
  uint32_t stamp = 0;
  std::vector<int64_t> waiting;  // items
  std::vector<int32_t> devices;
};

struct Device {
  std::vector<int32_t> computing;    // lanes
  std::vector<int32_t> meetings[3];  // by link
  double pressure = 0;
  std::vector<int32_t> engine[2];  // lanes whose copy runs (the first) or waits for the engine
};

struct Event {
  bool over = false;
  double at = 0;
  std::vector<int32_t> lanes, hosts;
};

struct Host {
  int64_t next;
  double clock = 0;
  int64_t waits_for = 0;     // the number of things it waits for
  int64_t waits_in = kNone;  // item
};

enum What : uint8_t { kLane, kComputed, kMet, kCopied, kLeft, kHost };

struct Moment {
  double at;
  uint64_t order;  // among equal moments, the one that was foreseen first comes first
  What what;
  uint32_t stamp;
  int64_t who;
  bool operator<(const Moment& other) const { return at != other.at ? at > other.at : order > other.order; }
};

class Clock {
 public:
  Clock(const Job& job, Result& result)
      : job_(job),
        out_(result),
        lanes_(job.lanes),
        devices_(job.devices),
        events_(job.events),
        meetings_(job.meetings),
        hosts_(job.ranks),
        next_(job.items, kNone),
        parts_left_(job.items, 0),
        awaited_(job.items, kNone),
        over_(job.items, 0) {}

  int64_t run() {
    for (int64_t rank = 0; rank < job_.ranks; ++rank) {
      hosts_[rank].next = job_.first_item[rank];
      foresee(0, kHost, rank);
    }
    while (!moments_.empty()) {
      const Moment moment = moments_.top();
      moments_.pop();
      const double now = moment.at;
      switch (moment.what) {
        case kHost: host(moment.who, now); break;
        case kLane:
          lanes_[moment.who].busy = false;
          advance(moment.who, now);
          break;
        case kComputed:
          if (moment.stamp == lanes_[moment.who].stamp) computed(moment.who, now);
          break;
        case kCopied: copied(moment.who, now); break;
        case kMet:
          if (moment.stamp == meetings_[moment.who].stamp) meeting_over(moment.who, now);
          break;
        case kLeft: part_over(moment.who, now); break;
      }
    }
    int64_t stuck = 0;  // ranks
    for (int64_t rank = 0; rank < job_.ranks; ++rank) {
      out_.host_over[rank] = hosts_[rank].clock;
      stuck += hosts_[rank].next < job_.first_item[rank + 1];
    }
    for (const Lane& lane : lanes_) stuck += lane.head != kNone;
    return stuck;
  }

 private:
  void foresee(double at, What what, int64_t who, uint32_t stamp = 0) {
    moments_.push({at, order_++, what, stamp, who});
  }

  // ---- the host: issues items until it has to wait ----
  void host(int64_t rank, double now) {
    Host& host = hosts_[rank];
    host.clock = std::max(host.clock, now);
    if (host.waits_in != kNone) out_.over[host.waits_in] = host.clock, host.waits_in = kNone;
    const int64_t end = job_.first_item[rank + 1];
    while (host.next < end) {
      const int64_t item = host.next;
      if (job_.kind[item] <= kWait && lanes_[job_.lane[item]].queued >= job_.queue) {
        lanes_[job_.lane[item]].host = int32_t(rank);
        host.waits_for = 1;
        return;
      }
      ++host.next;
      host.clock += job_.host_s[item];
      out_.issued[item] = out_.began[item] = out_.met[item] = out_.over[item] = host.clock;
      switch (job_.kind[item]) {
        case kHostEvent: {
          Event& event = events_[job_.subject[item]];
          if (event.over) host.clock = std::max(host.clock, event.at);
          else event.hosts.push_back(rank), host.waits_for = 1;
          break;
        }
        case kHostLane: wait_for_tail(host, rank, job_.lane[item]); break;
        case kHostDevice:
          for (int64_t lane = 0; lane < job_.lanes; ++lane)
            if (job_.device_of[lane] == job_.subject[item]) wait_for_tail(host, rank, lane);
          break;
        case kHostMeet: host_meets(item, rank); break;
        case kMark: break;
        default: issue(item, host.clock, now);
      }
      if (host.waits_for) {
        host.waits_in = item;
        return;
      }
    }
  }

  void wait_for_tail(Host& host, int64_t rank, int64_t lane) {
    const int64_t tail = lanes_[lane].tail;
    if (tail == kNone) return;
    if (over_[tail]) host.clock = std::max(host.clock, out_.over[tail]);
    else awaited_[tail] = int32_t(rank), ++host.waits_for;
  }

  void release_host(int64_t rank, double now) {
    if (--hosts_[rank].waits_for == 0) foresee(std::max(now, hosts_[rank].clock), kHost, rank);
    else hosts_[rank].clock = std::max(hosts_[rank].clock, now);
  }

  void issue(int64_t item, double at, double now) {
    const int32_t number = job_.lane[item];
    Lane& lane = lanes_[number];
    if (lane.head == kNone) lane.head = item;
    else next_[lane.tail] = item;
    lane.tail = item;
    ++lane.queued;
    if (lane.head == item && !lane.busy) {
      lane.busy = true;
      foresee(std::max(at, now), kLane, number);
    }
  }

  // ---- lanes ----
  void advance(int32_t number, double now) {
    Lane& lane = lanes_[number];
    while (lane.head != kNone) {
      const int64_t item = lane.head;
      if (out_.issued[item] > now) {
        lane.busy = true;
        return foresee(out_.issued[item], kLane, number);
      }
      out_.began[item] = out_.met[item] = now;
      switch (job_.kind[item]) {
        case kRecord:
          event_over(job_.subject[item], now);
          finish(item, now);
          continue;
        case kWait:
          if (!events_[job_.subject[item]].over) {
            lane.busy = true;
            events_[job_.subject[item]].lanes.push_back(number);
            return;
          }
          finish(item, now);
          continue;
        case kCompute: lane.busy = true; return compute(number, now);
        case kCopyIn:
        case kCopyOut: lane.busy = true; return copy(number, now);
        default: lane.busy = true; return arrive(item, now);
      }
    }
  }

  // Removes the head of its lane, which is over.
  void finish(int64_t item, double now) {
    Lane& lane = lanes_[job_.lane[item]];
    out_.over[item] = now;
    over_[item] = 1;
    lane.head = next_[item];
    --lane.queued;
    if (lane.host != kNone) release_host(std::exchange(lane.host, kNone), now);
    if (awaited_[item] != kNone) release_host(awaited_[item], now);
  }

  void finish_and_advance(int64_t item, double now) {
    finish(item, now);
    lanes_[job_.lane[item]].busy = false;
    advance(job_.lane[item], now);
  }

  void event_over(int32_t number, double now) {
    Event& event = events_[number];
    event.over = true;
    event.at = now;
    for (int32_t lane : event.lanes) foresee(now, kLane, lane);
    for (int32_t rank : event.hosts) release_host(rank, now);
    event.lanes.clear(), event.hosts.clear();
  }

  // ---- compute ----
  void compute(int32_t number, double now) {
    Lane& lane = lanes_[number];
    lane.left = job_.work_s[lane.head];
    lane.rate = 0;
    lane.since = now;
    auto& device = devices_[job_.device_of[number]];
    device.computing.push_back(number);
    pace_compute(device, now);
  }

  void computed(int32_t number, double now) {
    auto& device = devices_[job_.device_of[number]];
    std::erase(device.computing, number);
    pace_compute(device, now);
    finish_and_advance(lanes_[number].head, now);
  }

  void pace_compute(Device& device, double now) {
    const double rate = std::max(kSlowest, 1 - device.pressure) / std::max<size_t>(1, device.computing.size());
    for (int32_t number : device.computing) {
      Lane& lane = lanes_[number];
      if (lane.rate == rate) continue;
      lane.left = std::max(0.0, lane.left - (now - lane.since) * lane.rate);
      lane.since = now;
      lane.rate = rate;
      foresee(now + lane.left / rate, kComputed, number, ++lane.stamp);
    }
  }

  // ---- copies ----
  void copy(int32_t number, double now) {
    auto& engine = devices_[job_.device_of[number]].engine[job_.kind[lanes_[number].head] == kCopyOut];
    engine.push_back(number);
    if (engine.size() == 1) foresee(now + job_.work_s[lanes_[number].head], kCopied, number);
  }

  void copied(int32_t number, double now) {
    auto& engine = devices_[job_.device_of[number]].engine[job_.kind[lanes_[number].head] == kCopyOut];
    engine.erase(engine.begin());
    if (!engine.empty()) {
      const int64_t next = lanes_[engine.front()].head;
      out_.met[next] = now;
      foresee(now + job_.work_s[next], kCopied, engine.front());
    }
    finish_and_advance(lanes_[number].head, now);
  }

  // ---- meetings ----
  void arrive(int64_t item, double now) {
    parts_left_[item] = int32_t(job_.first_part[item + 1] - job_.first_part[item]);
    if (parts_left_[item] == 0) return finish_and_advance(item, now);
    const int32_t device = job_.device_of[job_.lane[item]];
    for (int64_t part = job_.first_part[item]; part < job_.first_part[item + 1]; ++part) {
      const int32_t number = job_.meeting[part];
      if (job_.waits[part]) meetings_[number].waiting.push_back(item);
      else foresee(now + job_.meeting_s[number], kLeft, item);
      join(number, device, now);
    }
  }

  void host_meets(int64_t item, int64_t rank) {
    const int64_t part = job_.first_part[item];
    if (part == job_.first_part[item + 1]) return;
    const int32_t number = job_.meeting[part];
    if (job_.waits[part]) meetings_[number].waiting.push_back(item), hosts_[rank].waits_for = 1;
    awaited_[item] = int32_t(rank);
    // This host is ahead of the clock: the others may have arrived later than it, or may arrive later still.
    meetings_[number].since = std::max(meetings_[number].since, hosts_[rank].clock);
    join(number, kNone, meetings_[number].since);
  }

  void join(int32_t number, int32_t device, double now) {
    Meeting& meeting = meetings_[number];
    if (device != kNone) meeting.devices.push_back(device);
    if (++meeting.arrived < job_.members[number]) return;
    meeting.left = job_.meeting_s[number];
    meeting.since = now;
    for (int64_t item : meeting.waiting) out_.met[item] = now;
    for (int32_t each : meeting.devices) {
      Device& at = devices_[each];
      at.meetings[job_.link[number]].push_back(number);
      at.pressure += job_.pressure[number];
      pace_compute(at, now);
    }
    if (meeting.devices.empty()) pace_meeting(number, now);
    for (int32_t each : meeting.devices) pace_meetings(devices_[each].meetings[job_.link[number]], now);
  }

  void pace_meetings(const std::vector<int32_t>& numbers, double now) {
    for (int32_t number : numbers) pace_meeting(number, now);
  }

  // Sets the rate that the most crowded link of its members allows.
  void pace_meeting(int32_t number, double now) {
    Meeting& meeting = meetings_[number];
    size_t crowd = 1;
    if (job_.link[number] < kUnshared)
      for (int32_t each : meeting.devices) crowd = std::max(crowd, devices_[each].meetings[job_.link[number]].size());
    const double rate = 1.0 / double(crowd);
    if (meeting.rate == rate) return;
    meeting.left = std::max(0.0, meeting.left - (now - meeting.since) * meeting.rate);
    meeting.since = now;
    meeting.rate = rate;
    foresee(now + meeting.left / rate, kMet, number, ++meeting.stamp);
  }

  void meeting_over(int32_t number, double now) {
    Meeting& meeting = meetings_[number];
    for (int32_t each : meeting.devices) {
      Device& at = devices_[each];
      std::erase(at.meetings[job_.link[number]], number);
      at.pressure = at.meetings[0].empty() && at.meetings[1].empty() && at.meetings[2].empty()
                        ? 0
                        : at.pressure - job_.pressure[number];
      pace_compute(at, now);
      pace_meetings(at.meetings[job_.link[number]], now);
    }
    for (int64_t item : meeting.waiting) part_over(item, now);
    meeting.waiting.clear(), meeting.waiting.shrink_to_fit();
  }

  void part_over(int64_t item, double now) {
    if (job_.kind[item] == kHostMeet) {
      out_.over[item] = now;
      return release_host(awaited_[item], now);
    }
    if (--parts_left_[item] == 0) finish_and_advance(item, now);
  }

  const Job& job_;
  Result& out_;
  std::vector<Lane> lanes_;
  std::vector<Device> devices_;
  std::vector<Event> events_;
  std::vector<Meeting> meetings_;
  std::vector<Host> hosts_;
  std::vector<int64_t> next_;
  std::vector<int32_t> parts_left_, awaited_;
  std::vector<uint8_t> over_;
  std::priority_queue<Moment> moments_;
  uint64_t order_ = 0;
};

}  // namespace

extern "C" int64_t maya_simulate(const Job* job, Result* result) { return Clock(*job, *result).run(); }
