// Folders: listing both trees as one, making, removing, renaming and linking.

#include "overlay.h"

#include <dirent.h>
#include <linux/fs.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/time.h>

#include <filesystem>
#include <functional>
#include <map>
#include <set>

namespace overlay {

std::mutex listings_lock;

namespace {

// ---- folders ----

// A listing of both trees. The first stream is the one that the program holds.
struct Listing {
  std::string path;
  DIR* second;
  bool first_is_real;
  std::set<std::string> seen;
  bool in_second = false;
};

std::map<DIR*, Listing> listings;
std::atomic<int> open_listings{0};

// Adds the other tree to a stream of one of them, where there is something to add or to hide.
DIR* listed(DIR* first, const std::string& path, bool first_is_real, bool other) {
  if (first == nullptr) return nullptr;
  auto hides = access((in_use->gone + path).c_str(), F_OK) == 0;
  if (!other && !(first_is_real && hides)) return first;
  auto* second = other ? opendir(first_is_real ? upper_of(path).c_str() : path.c_str()) : nullptr;
  std::lock_guard lock(listings_lock);
  listings[first] = {path, second, first_is_real, {}};
  ++open_listings;
  return first;
}

DIR* w_opendir(const char* path) {
  Call call(AT_FDCWD, path, true, false);
  if (call.passes()) return opendir(path);
  auto& place = call.place;
  if (!place.there()) {
    errno = ENOENT;
    return nullptr;
  }
  bool both = place.lower && place.upper && is_folder(place.path);
  return listed(opendir(place.actual().c_str()), place.path, place.lower && (both || !place.upper), both);
}

DIR* w_fdopendir(int folder) {
  auto* own = settings.load(std::memory_order_acquire);
  auto real = own == nullptr || !own->written->load() ? "" : at_descriptor(folder);
  if (real.empty() || (untouched(*own, real) && !below(real, own->files))) return fdopendir(folder);
  in_use = own;
  auto place = look(as_seen(*own, real));
  bool is_real = !below(real, own->files);
  return listed(fdopendir(folder), place.path, is_real, is_real ? place.upper : place.lower && is_folder(place.path));
}

struct dirent* w_readdir(DIR* stream) {
  if (!open_listings.load()) return readdir(stream);
  std::lock_guard lock(listings_lock);
  auto found = listings.find(stream);
  auto* own = settings.load(std::memory_order_acquire);
  if (found == listings.end() || own == nullptr) return readdir(stream);
  in_use = own;
  auto& listing = found->second;
  int before = errno;  // which tells the end from an error
  while (true) {
    errno = before;
    auto* entry = listing.in_second ? readdir(listing.second) : readdir(stream);
    if (entry == nullptr) {
      if (errno != before || listing.in_second || listing.second == nullptr) return nullptr;
      listing.in_second = true;
      continue;
    }
    bool real = listing.first_is_real != listing.in_second;
    std::string name = entry->d_name;
    bool dots = name == "." || name == "..";
    if (listing.in_second && dots) continue;
    auto path = (listing.path == "/" ? "" : listing.path) + "/" + name;
    if (real && !dots && access((own->gone + path + "/.gone").c_str(), F_OK) == 0 &&
        (listing.in_second || !exists(upper_of(path))))
      continue;
    if (!listing.seen.insert(name).second) continue;
    errno = before;
    return entry;
  }
}

int w_closedir(DIR* stream) {
  if (open_listings.load()) {
    std::lock_guard lock(listings_lock);
    if (auto found = listings.find(stream); found != listings.end()) {
      if (found->second.second) closedir(found->second.second);
      listings.erase(found);
      --open_listings;
    }
  }
  return closedir(stream);
}

void w_rewinddir(DIR* stream) {
  rewinddir(stream);
  if (!open_listings.load()) return;
  std::lock_guard lock(listings_lock);
  if (auto found = listings.find(stream); found != listings.end()) {
    if (found->second.second) rewinddir(found->second.second);
    found->second.seen.clear();
    found->second.in_second = false;
  }
}

std::vector<std::string> entries(const std::string& path) {
  std::vector<std::string> found;
  auto* stream = w_opendir(path.c_str());
  if (stream == nullptr) return found;
  while (auto* entry = w_readdir(stream))
    if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) found.emplace_back(entry->d_name);
  w_closedir(stream);
  return found;
}

int w_scandir(const char* path, struct dirent*** names, int (*keeps)(const struct dirent*),
              int (*compare)(const struct dirent**, const struct dirent**)) {
  auto* stream = w_opendir(path);
  if (stream == nullptr) return -1;
  std::vector<struct dirent*> found;
  while (auto* entry = w_readdir(stream)) {
    if (keeps && !keeps(entry)) continue;
    auto* kept = static_cast<struct dirent*>(malloc(entry->d_reclen));
    memcpy(kept, entry, entry->d_reclen);
    found.push_back(kept);
  }
  w_closedir(stream);
  *names = static_cast<struct dirent**>(malloc(sizeof(struct dirent*) * (found.size() + 1)));
  std::copy(found.begin(), found.end(), *names);
  if (compare)
    qsort(*names, found.size(), sizeof(struct dirent*), reinterpret_cast<int (*)(const void*, const void*)>(compare));
  return int(found.size());
}

int w_mkdirat(int folder, const char* path, mode_t mode) {
  Call call(folder, path, false, true);
  if (call.passes() || (!call.place.there() && !is_protected(call.place))) return mkdirat(folder, path, mode);
  if (call.place.there()) return fails(EEXIST);
  if (!prepare(call.place)) return -1;
  return mkdir(upper_of(call.place.path).c_str(), mode);
}

int w_mkdir(const char* path, mode_t mode) { return w_mkdirat(AT_FDCWD, path, mode); }

char* w_mkdtemp(char* name) {
  return make_unique(name, 0, [=] { return w_mkdir(name, 0700); }) == 0 ? name : nullptr;
}

// ---- removing and renaming ----

int remove_file(int folder, const char* path) {
  Call call(folder, path, false, true);
  auto& place = call.place;
  if (call.passes() || (place.lower && !is_protected(place))) return unlinkat(folder, path, 0);
  if (!place.there()) return fails(ENOENT);
  if (is_folder(place.actual())) return fails(EISDIR);
  if (place.upper && unlink(upper_of(place.path).c_str()) != 0) return -1;
  if (place.lower) mark_removed(place.path);
  return 0;
}

int remove_folder(int folder, const char* path) {
  Call call(folder, path, false, true);
  auto& place = call.place;
  if (call.passes() || (place.lower && !is_protected(place))) return unlinkat(folder, path, AT_REMOVEDIR);
  if (!place.there()) return fails(ENOENT);
  if (!is_folder(place.actual())) return fails(ENOTDIR);
  if (!entries(place.path).empty()) return fails(ENOTEMPTY);
  auto* own = in_use = settings.load(std::memory_order_acquire);
  if (own == nullptr) return fails(EBUSY);
  if (place.upper && rmdir(upper_of(place.path).c_str()) != 0) return -1;
  if (place.lower) mark_removed(place.path);
  return 0;
}

int w_unlinkat(int folder, const char* path, int flags) {
  return flags & AT_REMOVEDIR ? remove_folder(folder, path) : remove_file(folder, path);
}

int w_unlink(const char* path) { return remove_file(AT_FDCWD, path); }
int w_rmdir(const char* path) { return remove_folder(AT_FDCWD, path); }

int w_remove(const char* path) {
  int done = remove_file(AT_FDCWD, path);
  return done != 0 && errno == EISDIR ? remove_folder(AT_FDCWD, path) : done;
}

// Copies a folder of both trees, as long as that is not more than `left` bytes.
bool copy_folder(const std::string& from, const std::string& to, off_t& left) {
  if (mkdir(to.c_str(), 0777) != 0) return false;
  for (const auto& name : entries(from)) {
    auto place = look(from + "/" + name);
    auto actual = place.actual(), next = to + "/" + name, link = target_of(actual);
    struct stat found;
    if (lstat(actual.c_str(), &found) != 0) return false;
    bool done = false;
    if (S_ISDIR(found.st_mode)) done = copy_folder(place.path, next, left);
    else if (S_ISLNK(found.st_mode)) done = symlink(link.c_str(), next.c_str()) == 0;
    else if (S_ISREG(found.st_mode) && (left -= off_t(found.st_blocks) * 512) >= 0) done = copy(actual, next);
    else errno = EXDEV;
    if (!done) return false;
  }
  return true;
}

// Makes the overlay's copy of a folder that is also real, under its new name.
bool rename_by_copying(const Place& old, const Place& next) {
  static std::atomic<int> copies{0};
  auto coming = in_use->coming + "folder." + std::to_string(getpid()) + "." + std::to_string(++copies);
  auto left = LARGEST_COPY;
  bool done = copy_folder(old.path, coming, left) && rename(coming.c_str(), upper_of(next.path).c_str()) == 0;
  int error = errno;
  std::error_code ignored;
  std::filesystem::remove_all(done ? upper_of(old.path) : coming, ignored);
  if (done) mark_removed(old.path);
  errno = error;
  return done;
}

// A folder that is too large to be copied is not renamed: the program is told, as by overlayfs, to copy it (EXDEV).
int rename_at(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) {
  Call source(from_folder, from, false, true), target(to_folder, to, false, true);
  if (source.passes() && target.passes()) return renameat2(from_folder, from, to_folder, to, flags);
  auto &old = source.place, &next = target.place;
  bool moves = !source.passes() && is_protected(old), covers = !target.passes() && is_protected(next);
  if (!moves && !covers) return renameat2(from_folder, from, to_folder, to, flags);
  if (source.passes() && !next.there() && prepare(next))
    return renameat2(from_folder, from, AT_FDCWD, upper_of(next.path).c_str(), flags);
  if (source.passes() || target.passes()) return fails(EXDEV);
  if (!old.there()) return fails(ENOENT);
  if (flags & ~unsigned(RENAME_NOREPLACE)) return fails(EINVAL);
  if ((flags & RENAME_NOREPLACE) && next.there()) return fails(EEXIST);
  if (old.path == next.path) return 0;
  auto upper = upper_of(next.path);
  if (is_folder(old.actual())) {
    if (below(next.path, old.path)) return fails(EINVAL);
    if (next.there() && !is_folder(next.actual())) return fails(ENOTDIR);
    if (next.there() && !entries(next.path).empty()) return fails(ENOTEMPTY);
    in_use = settings.load(std::memory_order_acquire);
    if (in_use == nullptr) return fails(EBUSY);
    if (next.lower) mark_removed(next.path);  // it is empty, and stays so below the renamed one
    if (!prepare(next)) return -1;
    if (!old.lower) return rename(upper_of(old.path).c_str(), upper.c_str());
    if (!moves) return rename(old.path.c_str(), upper.c_str());  // a new temporary folder
    return rename_by_copying(old, next) ? 0 : -1;
  }
  if (next.there() && is_folder(next.actual())) return fails(EISDIR);
  if (!prepare(next)) return -1;
  if (old.upper) {
    if (rename(upper_of(old.path).c_str(), upper.c_str()) != 0) return -1;
  } else {
    if (!moves && rename(old.path.c_str(), upper.c_str()) == 0) return 0;
    auto link = target_of(old.path);
    if (!link.empty()) unlink(upper.c_str());
    if (link.empty() ? !copy(old.path, upper, true) : symlink(link.c_str(), upper.c_str()) != 0) return -1;
  }
  if (old.lower && !moves) return unlink(old.path.c_str());  // a new temporary file
  if (old.lower) mark_removed(old.path);
  return 0;
}

int w_renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) {
  return rename_at(from_folder, from, to_folder, to, flags);
}
int w_renameat(int from_folder, const char* from, int to_folder, const char* to) {
  return rename_at(from_folder, from, to_folder, to, 0);
}
int w_rename(const char* from, const char* to) { return rename_at(AT_FDCWD, from, AT_FDCWD, to, 0); }

int w_linkat(int from_folder, const char* from, int to_folder, const char* to, int flags) {
  Call source(from_folder, from, flags & AT_SYMLINK_FOLLOW, true), target(to_folder, to, false, true);
  bool covers = !target.passes() && is_protected(target.place);
  if (!covers && (source.passes() || !source.place.upper)) return linkat(from_folder, from, to_folder, to, flags);
  if (target.passes()) return fails(EXDEV);
  if (!source.passes() && !source.place.there()) return fails(ENOENT);
  if (target.place.there()) return fails(EEXIST);
  if (!prepare(target.place)) return -1;
  auto upper = upper_of(target.place.path);
  if (source.passes()) return linkat(from_folder, from, AT_FDCWD, upper.c_str(), flags);  // also one without a name
  if (source.place.upper) return link(upper_of(source.place.path).c_str(), upper.c_str());
  return copy(source.place.path, upper) ? 0 : -1;
}

int w_link(const char* from, const char* to) { return w_linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }

// Makes something new at a path: `act` makes it in the overlay, `pass` in the real place.
template <typename Act, typename Pass>
int make_at(int folder, const char* path, Act act, Pass pass) {
  Call call(folder, path, false, true);
  if (call.passes() || (!call.place.there() && !is_protected(call.place))) return pass();
  if (call.place.there()) return fails(EEXIST);
  if (!prepare(call.place)) return -1;
  return act(upper_of(call.place.path).c_str());
}

int w_symlinkat(const char* target, int folder, const char* path) {
  return make_at(
      folder, path, [=](const char* where) { return symlink(target, where); },
      [=] { return symlinkat(target, folder, path); });
}

int w_symlink(const char* target, const char* path) { return w_symlinkat(target, AT_FDCWD, path); }

int w_mkfifoat(int folder, const char* path, mode_t mode) {
  return make_at(
      folder, path, [=](const char* where) { return mkfifo(where, mode); },
      [=] { return mkfifoat(folder, path, mode); });
}

int w_mkfifo(const char* path, mode_t mode) { return w_mkfifoat(AT_FDCWD, path, mode); }

int w_mknodat(int folder, const char* path, mode_t mode, dev_t device) {
  return make_at(
      folder, path, [=](const char* where) { return mknod(where, mode, device); },
      [=] { return mknodat(folder, path, mode, device); });
}

int w_mknod(const char* path, mode_t mode, dev_t device) { return w_mknodat(AT_FDCWD, path, mode, device); }
int w_xmknod(int, const char* path, mode_t mode, dev_t* device) { return w_mknod(path, mode, *device); }
int w_xmknodat(int, int folder, const char* path, mode_t mode, dev_t* device) {
  return w_mknodat(folder, path, mode, *device);
}

}  // namespace

const Functions& folder_functions() {
  static const Functions table{
      {"opendir", address(w_opendir)},     {"fdopendir", address(w_fdopendir)}, {"readdir", address(w_readdir)},
      {"readdir64", address(w_readdir)},   {"closedir", address(w_closedir)},   {"rewinddir", address(w_rewinddir)},
      {"scandir", address(w_scandir)},     {"scandir64", address(w_scandir)},   {"mkdir", address(w_mkdir)},
      {"mkdirat", address(w_mkdirat)},     {"unlink", address(w_unlink)},       {"unlinkat", address(w_unlinkat)},
      {"rmdir", address(w_rmdir)},         {"remove", address(w_remove)},       {"rename", address(w_rename)},
      {"renameat", address(w_renameat)},   {"renameat2", address(w_renameat2)}, {"link", address(w_link)},
      {"linkat", address(w_linkat)},       {"symlink", address(w_symlink)},     {"symlinkat", address(w_symlinkat)},
      {"mkfifo", address(w_mkfifo)},       {"mkfifoat", address(w_mkfifoat)},   {"mkdtemp", address(w_mkdtemp)},
      {"mknod", address(w_mknod)},         {"mknodat", address(w_mknodat)},     {"__xmknod", address(w_xmknod)},
      {"__xmknodat", address(w_xmknodat)},
  };
  return table;
}

}  // namespace overlay
