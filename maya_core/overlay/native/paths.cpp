// Settings, the paths that a program means, and what is done with them.

#include "overlay.h"

#include <limits.h>
#include <linux/fs.h>
#include <stdio.h>
#include <sys/ioctl.h>

namespace overlay {

std::atomic<const Settings*> settings{nullptr};  // old ones are never freed: another thread may still use them
constinit thread_local const Settings* in_use = nullptr;

bool below(const std::string& path, const std::string& folder) {
  return path.compare(0, folder.size(), folder) == 0 && (path.size() == folder.size() || path[folder.size()] == '/');
}

// Whether files of that path are real. The program's folder counts if it is below a folder of real files.
bool untouched(const Settings& own, const std::string& path) {
  for (const auto& folder : own.untouched)
    if (below(path, folder) && !(below(own.working, folder) && below(path, own.working))) return true;
  return false;
}

// ---- paths ----

// A path with the overlay's own prefix taken off: the place that it stands for.
std::string as_seen(const Settings& own, std::string path) {
  return below(path, own.files) ? path.substr(own.files.size()).insert(0, path.size() == own.files.size() ? "/" : "")
                                : path;
}

std::string folder_of(const std::string& path) {
  auto slash = path.rfind('/');
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::string at_descriptor(int descriptor) {
  char name[64], target[PATH_MAX];
  snprintf(name, sizeof name, "/proc/self/fd/%d", descriptor);
  auto length = readlink(name, target, sizeof target - 1);
  return length > 0 && target[0] == '/' ? std::string(target, length) : "";
}

std::string working_folder() {
  char here[PATH_MAX];
  return getcwd(here, sizeof here) ? here : "";
}

// The path that is meant, from the root; empty if it cannot be told.
std::string absolute(const Settings& own, int folder, const char* path) {
  if (path[0] == '/') return as_seen(own, path);
  auto base = as_seen(own, folder == AT_FDCWD ? working_folder() : at_descriptor(folder));
  if (base.empty()) return "";
  return path[0] ? base + (base == "/" ? "" : "/") + path : base;
}

// What stands at a path, as the bits of its mode; 0 if nothing does.
mode_t kind_of(const std::string& path) {
  struct stat found;
  return lstat(path.c_str(), &found) == 0 ? found.st_mode : 0;
}

bool exists(const std::string& path) { return kind_of(path) != 0; }

bool is_folder(const std::string& path) {
  struct stat found;
  return lstat(path.c_str(), &found) == 0 && S_ISDIR(found.st_mode);
}

// Whether the real file of that path, or a folder above it, was removed.
bool removed(const Settings& own, const std::string& path) {
  if (access(own.gone.c_str(), F_OK) != 0) return false;
  for (size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    auto above = own.gone + path.substr(0, end);
    if (access((above + "/.gone").c_str(), F_OK) == 0) return true;
    if (end == std::string::npos || access(above.c_str(), F_OK) != 0) return false;
  }
}

std::string upper_of(const std::string& path) { return in_use->files + path; }

std::string Place::actual() const {
  // A folder that stands in both trees is read as the real one; its entries are those of both.
  return upper && !(lower && is_folder(path)) ? upper_of(path) : path;
}

Place look(const std::string& path) {
  auto upper = kind_of(upper_of(path)), lower = kind_of(path);
  if (lower && removed(*in_use, path)) lower = 0;
  return {path, upper != 0, lower != 0, bool(S_ISLNK(upper ? upper : lower))};
}

// Looks at the parts of a path from the root. Below a folder that the overlay's trees do not have, nothing is in them.
class Walk {
 public:
  Place into(const std::string& path) {
    mode_t upper = in_upper_ ? kind_of(upper_of(path)) : 0, lower = kind_of(path);
    in_upper_ = upper != 0;
    if (in_gone_ && !gone_) {
      auto folder = in_use->gone + path;
      in_gone_ = access(folder.c_str(), F_OK) == 0;
      gone_ = in_gone_ && access((folder + "/.gone").c_str(), F_OK) == 0;
    }
    if (gone_) lower = 0;
    return {path, upper != 0, lower != 0, bool(S_ISLNK(upper ? upper : lower))};
  }

 private:
  bool in_upper_ = true;
  bool in_gone_ = access(in_use->gone.c_str(), F_OK) == 0;
  bool gone_ = false;
};

std::string target_of(const std::string& path) {
  char target[PATH_MAX];
  auto length = readlink(path.c_str(), target, sizeof target - 1);
  return length > 0 ? std::string(target, length) : "";
}

// Follows the links in a path, in both trees. The last part is followed if `follow`.
Place resolve(const std::string& wanted, bool follow) {
  std::vector<std::string> left;  // parts that are still to be walked, the next one last
  auto push = [&](const std::string& path) {
    std::vector<std::string> parts;
    for (size_t begin = 0; begin < path.size();) {
      auto end = path.find('/', begin);
      if (end == std::string::npos) end = path.size();
      if (end > begin) parts.push_back(path.substr(begin, end - begin));
      begin = end + 1;
    }
    left.insert(left.end(), parts.rbegin(), parts.rend());
  };
  push(wanted);
  bool as_folder = !wanted.empty() && wanted.back() == '/';
  const Place root{"/", false, true};
  std::string walked;
  auto place = root;
  Walk walk;
  bool from_root = true;  // whether `walk` has been through what was walked
  for (int links = 0; !left.empty();) {
    auto part = left.back();
    left.pop_back();
    if (part == ".") continue;
    if (part == "..") {
      if (!place.there()) return Place{walked + "/.."};
      walked = walked.empty() || folder_of(walked) == "/" ? "" : folder_of(walked);
      place = walked.empty() ? root : look(walked);
      from_root = false;
      continue;
    }
    place = from_root ? walk.into(walked + "/" + part) : look(walked + "/" + part);
    bool last = left.empty();
    if (place.link && (!last || follow || as_folder)) {
      auto target = target_of(place.upper ? upper_of(place.path) : place.path);
      if (!target.empty() && ++links <= 40) {
        if (target[0] == '/') walked.clear();
        push(target);
        place = walked.empty() ? root : look(walked);
        from_root = walked.empty();
        walk = Walk();
        continue;
      }
    }
    walked = place.path;
  }
  return place;
}

// ---- what is done with a path ----

// Whether Python keeps compiled modules there, beside modules of the user's. Beside the program's, they are in the
// overlay.
bool is_bytecode(const std::string& path) {
  auto at = path.find("/__pycache__");
  if (at == std::string::npos) return false;
  auto folder = resolve(path.substr(0, at), true);
  return folder.lower && !exists(upper_of(folder.path + "/__pycache__"));
}

Call::Call(int folder, const char* path, bool follow, bool writes) {
  auto* own = settings.load(std::memory_order_acquire);
  if (own == nullptr || path == nullptr || !path[0]) return;
  if (!writes && !own->written->load(std::memory_order_relaxed)) return;
  in_use = own;
  auto wanted = absolute(*own, folder, path);
  if (wanted.empty() || untouched(*own, wanted) || is_bytecode(wanted)) return;
  place = resolve(wanted, follow);
  // A link may lead to a folder that is not touched.
  covered_ = !untouched(*own, place.path);
}

// Whether it was there when the run began. File systems that do not know when a file was made know when it was last
// changed.
bool older_than_run(const std::string& path) {
  struct statx found;
  if (statx(AT_FDCWD, path.c_str(), AT_SYMLINK_NOFOLLOW, STATX_BTIME | STATX_CTIME, &found) != 0) return false;
  auto& at = found.stx_mask & STATX_BTIME ? found.stx_btime : found.stx_ctime;
  auto& begun = in_use->begun;
  return at.tv_sec < begun.tv_sec || (at.tv_sec == begun.tv_sec && at.tv_nsec < begun.tv_nsec);
}

// Whether a change of that place goes to the overlay. In temporary folders, what is new is real, because other programs
// may need it.
bool is_protected(const Place& place) {
  if (place.upper || below(place.path, in_use->working)) return true;
  for (const auto& folder : in_use->temporary) {
    if (!below(place.path, folder)) continue;
    auto child = place.path.substr(0, place.path.find('/', folder.size() + 1));  // of the temporary folder
    return older_than_run(child) || exists(upper_of(child));
  }
  return true;
}

bool make_folders(const std::string& path) {
  if (mkdir(path.c_str(), 0777) == 0 || errno == EEXIST) return true;
  if (errno != ENOENT || !make_folders(folder_of(path))) return false;
  return mkdir(path.c_str(), 0777) == 0 || errno == EEXIST;
}

void begin_writing() { in_use->written->store(1, std::memory_order_relaxed); }

// Makes the folders in the overlay that a new file needs. False, with errno, if there is no such folder for the
// program.
bool prepare(const Place& place) {
  auto above = folder_of(place.path);
  auto found = look(above);
  if (above != "/" && !found.there()) {
    errno = ENOENT;
    return false;
  }
  if (above != "/" && !is_folder(found.actual())) {
    errno = ENOTDIR;
    return false;
  }
  if (found.lower && !found.upper && access(above.c_str(), W_OK) != 0)
    return false;  // nor could the program write there
  begin_writing();
  return make_folders(upper_of(above));
}

// Copies the parts of a file that are no holes.
bool copy_data(int source, int target, off_t size) {
  if (ftruncate(target, size) != 0) return false;
  for (off_t begin = 0, end; begin < size; begin = end) {
    auto data = lseek(source, begin, SEEK_DATA);
    if (data < 0 && errno == ENXIO) return true;  // only a hole is left
    if (data >= 0) begin = data;
    end = data < 0 ? size : lseek(source, begin, SEEK_HOLE);
    for (off_t from = begin, to = begin; from < end;) {
      auto moved = copy_file_range(source, &from, target, &to, end - from, 0);
      if (moved < 0 && (errno == EXDEV || errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP)) {
        char block[1 << 16];
        moved = pread(source, block, std::min<off_t>(sizeof block, end - from), from);
        if (moved > 0 && pwrite(target, block, moved, to) != moved) return false;
        from += moved, to += moved;
      }
      if (moved < 0) return false;
      if (moved == 0) return true;  // it is shorter now
    }
  }
  return true;
}

// Copies a file with its mode and times. `to` is complete when it appears; what another process has put there meanwhile
// stays, unless `replaces`.
bool copy(const std::string& from, const std::string& to, bool replaces) {
  static std::atomic<int> copies{0};
  int source = open(from.c_str(), O_RDONLY | O_CLOEXEC);
  if (source < 0) return false;
  auto coming = in_use->coming + std::to_string(getpid()) + "." + std::to_string(++copies);
  struct stat found;
  fstat(source, &found);
  int target = open(coming.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  bool done = target >= 0;
  if (done && ioctl(target, FICLONE, source) != 0) {
    errno = EROFS;
    done = off_t(found.st_blocks) * 512 <= LARGEST_COPY && copy_data(source, target, found.st_size);
  }
  if (done) {
    timespec times[2] = {found.st_atim, found.st_mtim};
    fchmod(target, found.st_mode & 07777);
    futimens(target, times);
    done =
        replaces ? rename(coming.c_str(), to.c_str()) == 0 : link(coming.c_str(), to.c_str()) == 0 || errno == EEXIST;
  }
  int error = errno;
  close(source);
  if (target >= 0) close(target);
  unlink(coming.c_str());
  errno = error;
  return done;
}

// Brings a real file or link into the overlay, so that it can be changed there.
bool bring(const Place& place) {
  if (place.upper) return true;
  if (!prepare(place)) return false;
  auto target = target_of(place.path);
  if (!target.empty()) return symlink(target.c_str(), upper_of(place.path).c_str()) == 0;
  return copy(place.path, upper_of(place.path));
}

void mark_removed(const std::string& path) {
  begin_writing();
  auto folder = in_use->gone + path;
  make_folders(folder);
  int mark = open((folder + "/.gone").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  if (mark >= 0) close(mark);
}

int fails(int error) {
  errno = error;
  return -1;
}

}  // namespace overlay
