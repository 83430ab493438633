"""What an emulated program does to files: it finds what it wrote, and nothing of the user's changes. Every program here runs twice, once for
real in a copy of the folder and once on the overlay: what it sees must be the same, and the user's folder must be as before."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import maya_core
from maya_core.overlay import files

# The user's folder.
FOLDER = {
    "model.pt": b"years of training" * 1000,
    "log.txt": b"epoch 1\n",
    "data/a.bin": bytes(range(256)),
    "data/b.bin": b"b",
    "data/deep/c.bin": b"c",
    "old/x": b"x",
    "config.json": b'{"lr": 0.1}',
}

# Each prints what it sees after what it did.
PROGRAMS = {
    "replace by a temporary file": """
        open("model.tmp", "wb").write(b"new"); os.replace("model.tmp", "model.pt")
        print(open("model.pt", "rb").read(), sorted(os.listdir(".")))""",
    "remove, then write": """
        os.remove("model.pt"); print(os.path.exists("model.pt"))
        open("model.pt", "wb").write(b"again"); print(os.path.getsize("model.pt"))""",
    "append": """
        with open("log.txt", "a") as log: log.write("epoch 2\\n")
        print(open("log.txt").read(), os.path.getsize("log.txt"))""",
    "change in place": """
        with open("data/a.bin", "r+b") as file: file.seek(10); file.write(b"!!")
        print(open("data/a.bin", "rb").read()[8:14], os.stat("data/a.bin").st_size)""",
    "truncate": """
        os.truncate("data/a.bin", 7); print(open("data/a.bin", "rb").read())""",
    "exclusive": """
        try: open("model.pt", "xb")
        except FileExistsError: print("exists")
        open("fresh", "x").write("1"); print(open("fresh").read())""",
    "a tree is removed and made again": """
        shutil.rmtree("data"); print(os.path.isdir("data"), sorted(os.listdir(".")))
        os.makedirs("data/new"); print([(sorted(d), sorted(f)) for _, d, f in os.walk("data")])
        open("data/b.bin", "w").write("other"); print(sorted(os.listdir("data")), open("data/b.bin").read())""",
    "listing both": """
        open("data/z.bin", "w").close(); os.remove("data/b.bin")
        print(sorted(os.listdir("data")), sorted(entry.name for entry in os.scandir("data") if entry.is_file()))
        print(sorted(str(path) for path in pathlib.Path("data").rglob("*")), len(list(os.walk("."))))""",
    "checkpoints in turn": """
        for step in range(4):
            os.makedirs(f"ckpt-tmp"); open("ckpt-tmp/w", "w").write(str(step)); os.rename("ckpt-tmp", f"ckpt-{step}")
            if step > 1: shutil.rmtree(f"ckpt-{step - 2}")
        print(sorted(os.listdir(".")), open("ckpt-3/w").read())""",
    "links": """
        os.symlink("model.pt", "last"); print(os.readlink("last"), os.path.getsize("last"), os.path.islink("last"))
        os.link("log.txt", "hard"); open("last", "wb").write(b"through the link")
        print(open("model.pt", "rb").read(), open("hard").read(), os.path.basename(os.path.realpath("last")))""",
    "copies and moves": """
        shutil.copy2("config.json", "copy.json"); shutil.copytree("data", "data2"); shutil.move("copy.json", "data2/")
        print(sorted(os.listdir("data2")), json.load(open("data2/copy.json")))
        shutil.move("data/deep", "deeper"); print(os.listdir("deeper"), os.path.exists("data/deep"))""",
    "a folder of the user's is moved": """
        shutil.move("old", "older"); print(os.path.exists("old"), open("older/x").read())""",
    "numpy": """
        np.save("a.npy", np.arange(8)); view = np.load("a.npy", mmap_mode="r+"); view[3] = 40; view.flush()
        np.savez("b.npz", x=np.ones(3)); np.arange(4, dtype=np.uint8).tofile("c.raw")
        print(np.load("a.npy").sum(), np.load("b.npz")["x"], os.path.getsize("c.raw"))""",
    "sqlite": """
        base = sqlite3.connect("runs.db"); base.execute("create table t(x)"); base.execute("insert into t values (7)")
        base.commit(); base.close(); print(sqlite3.connect("runs.db").execute("select x from t").fetchall())""",
    "descriptors of a folder": """
        folder = os.open("data", os.O_RDONLY); file = os.open("n", os.O_CREAT | os.O_WRONLY, dir_fd=folder); os.write(file, b"n"); os.close(file)
        os.unlink("b.bin", dir_fd=folder); os.rename("n", "m", src_dir_fd=folder, dst_dir_fd=folder)
        print(sorted(os.listdir("data")), os.stat("m", dir_fd=folder).st_size)""",
    "programs that were made": """
        open("run.sh", "w").write("#!/bin/sh\\necho runs\\n"); os.chmod("run.sh", 0o755)
        for options in ({}, {"env": {}}, {"shell": True}): print(subprocess.run("./run.sh", capture_output=True, text=True, **options).stdout)
        print(subprocess.run("env ./run.sh; find . -name run.sh -exec {} \\\\;", shell=True, capture_output=True, text=True).stdout)
        sys.stdout.flush(); print(os.spawnl(os.P_WAIT, "./run.sh", "run.sh"), os.waitpid(os.posix_spawn("./run.sh", ["run.sh"], {}), 0)[1])
        print(subprocess.run(["run.sh"], env={"PATH": os.getcwd()}, capture_output=True, text=True).stdout)""",
    "children without the variables": """
        print(subprocess.run(["/bin/sh", "-c", "echo x > made; cat made; rm -rf old"], env={}, capture_output=True, text=True))
        subprocess.run(["env", "-i", "/bin/sh", "-c", "echo x > second; echo y >> log.txt"])
        os.environ.clear(); os.system("echo x > third"); os.popen("echo x > fourth").close()
        print(sorted(os.listdir(".")), open("log.txt").read())""",
    "files with random names": """
        print(subprocess.run("sed -i s/epoch/EPOCH/ log.txt; cat log.txt; ls -A", shell=True, capture_output=True, text=True).stdout)
        for make in (tempfile.mkstemp, tempfile.mkdtemp): make(dir=".")
        print(len(os.listdir(".")))""",
    "attributes through descriptors": """
        with open("log.txt") as file: os.fchmod(file.fileno(), 0o600); os.utime(file.fileno(), (1, 1))
        print(oct(os.stat("log.txt").st_mode & 0o777), os.stat("log.txt").st_mtime)""",
    "what is changed keeps its other attributes": """
        before = os.stat("log.txt").st_mtime_ns; os.chmod("log.txt", 0o666); print(os.stat("log.txt").st_mtime_ns == before)
        before = os.stat("config.json").st_mtime_ns; os.rename("config.json", "c"); print(os.stat("c").st_mtime_ns == before)
        open("log.txt", "a").close(); print(oct(os.stat("log.txt").st_mode & 0o777))""",
    "sockets and nodes": """
        import socket; deep = "d" * 60 + "/" + "e" * 60; os.makedirs(deep)
        for path in ("socket", "data/socket"):
            server, client = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
            server.bind(path); server.listen(); client.connect(path); server.accept()[0].send(b"hello"); print(client.recv(5), sorted(os.listdir("data")))
        try: socket.socket(socket.AF_UNIX).bind("socket")
        except OSError as error: print(error.errno)
        os.unlink("socket"); os.mknod("node"); os.mkfifo("fifo"); print(sorted(os.listdir(".")))""",
    "a folder of code is copied": """
        os.makedirs("package/__pycache__"); open("package/__pycache__/m.pyc", "w").write("x"); open("package/m.py", "w").write("a = 1")
        shutil.copytree("package", "runs/code"); print(sorted(os.listdir("runs/code")), os.listdir("runs/code/__pycache__"))
        shutil.rmtree("runs"); print(os.path.exists("runs"))""",
    "a folder of the user's is renamed": """
        os.rename("data", "data.bak"); print(sorted(os.listdir(".")), sorted(os.listdir("data.bak")), open("data.bak/deep/c.bin").read())
        os.mkdir("data"); print(os.listdir("data")); os.rename("old", "older"); open("older/x", "a").write("y"); os.rename("older", "old")
        print(open("old/x").read(), os.path.exists("older"))
        try: os.rename("old", "old/inside")
        except OSError as error: print(error.errno)
        made = tempfile.mkdtemp(); open(made + "/f", "w").write("f"); shutil.move(made, "here"); print(os.listdir("here"), os.path.exists(made))""",
    "a folder that does not exist": """
        try: open("none/../x", "w")
        except FileNotFoundError: print("no such folder")
        os.mkdir("none"); open("none/../x", "w").close(); print(os.path.exists("x"))""",
    "processes append at once": """
        import multiprocessing; context = multiprocessing.get_context("fork"); barrier = context.Barrier(8)
        def append(index):
            barrier.wait()
            with open("log.txt", "a") as log: log.write(f"{index}\\n")
        all = [context.Process(target=append, args=(index,)) for index in range(8)]
        for each in all: each.start()
        for each in all: each.join()
        print(sorted(open("log.txt").read().split()))""",
    "another working folder": """
        os.makedirs("runs/1"); os.chdir("runs/1"); open("here", "w").write("1")
        print(os.path.relpath(os.getcwd(), START), os.listdir("."), open("../../log.txt").read())""",
    "modes and times": """
        os.chmod("log.txt", 0o600); os.utime("log.txt", (1, 1)); pathlib.Path("data/b.bin").touch()
        print(oct(os.stat("log.txt").st_mode & 0o777), os.stat("log.txt").st_mtime, os.access("log.txt", os.W_OK))""",
    "errors": """
        for act in (lambda: open("nowhere/x", "w"), lambda: os.remove("nothing"), lambda: os.rmdir("data"), lambda: os.mkdir("data"),
                    lambda: os.remove("data"), lambda: os.rename("nothing", "x"), lambda: open("data", "w")):
            try: act(); print("done")
            except OSError as error: print(type(error).__name__)""",
    "children": """
        open("made", "w").write("by the parent\\n")
        print(subprocess.run("cat made log.txt; echo more >> log.txt; mv made moved; rm -r data; mkdir -p q/r; ls; cat log.txt", shell=True,
              capture_output=True, text=True).stdout)
        print(open("log.txt").read(), os.path.exists("data"), os.path.exists("moved"))
        print(subprocess.run([sys.executable, "-c", "import os; open('c', 'w').write('x'); print(sorted(os.listdir('.')))"],
              capture_output=True, text=True).stdout)""",
    "a child in a new folder": """
        os.makedirs("build"); print(subprocess.run("echo 1 > x; cat x; ls", shell=True, cwd="build", capture_output=True, text=True).stdout)""",
    "temporary files": """
        with tempfile.NamedTemporaryFile("w+") as file: file.write("x"); file.flush(); print(os.path.exists(file.name))
        with tempfile.TemporaryDirectory() as folder:
            open(folder + "/t", "w").write("kept"); shutil.move(folder + "/t", "from-tmp")
        print(open("from-tmp").read(), os.path.exists(folder))""",
}
HEAD = "import json, os, pathlib, shutil, sqlite3, subprocess, sys, tempfile\nimport numpy as np\nSTART = os.getcwd()\n"
COVERED = """
import os, sys, pathlib
from maya_core.overlay import files
variables = files.environment(pathlib.Path(sys.argv[1]))
os.environ.update(variables)
files.start(variables)
exec(compile(open(sys.argv[2]).read(), "program", "exec"), {})
"""


def make(folder: Path) -> Path:
    for name, content in FOLDER.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def digest(folder: Path) -> dict[str, tuple[str, int, float]]:
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mode,
            path.stat().st_mtime,
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_sees_what_it_did_and_the_user_what_was_there(tmp_path: Path, name: str) -> None:
    program = tmp_path / "program.py"
    lines = [line[8:] if line.startswith(" " * 8) else line for line in PROGRAMS[name].strip("\n").splitlines()]
    program.write_text(HEAD + "\n".join(lines) + "\n")
    mine = make(tmp_path / "mine")
    shutil.copytree(mine, tmp_path / "copy")
    before, folders = digest(mine), sorted(path.name for path in mine.iterdir())
    real = subprocess.run([sys.executable, program], cwd=tmp_path / "copy", capture_output=True, text=True, timeout=60)
    assert real.returncode == 0, real.stderr
    done = subprocess.run(
        [sys.executable, "-c", COVERED, str(tmp_path / "aside"), str(program)],
        cwd=mine,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == real.stdout
    assert digest(mine) == before and sorted(path.name for path in mine.iterdir()) == folders
    assert digest(tmp_path / "copy") != before or "temporary" in name or name in ("errors",)


def test_it_is_as_before_afterwards(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    variables = files.environment(tmp_path / "aside")
    stop = files.start(variables)
    try:
        (tmp_path / "mine" / "x").write_text("covered")
        assert (tmp_path / "mine" / "x").read_text() == "covered"
    finally:
        stop()
    assert not (tmp_path / "mine" / "x").exists()
    assert [(each.path, each.bytes) for each in files.written(tmp_path / "aside")] == [(tmp_path / "mine" / "x", 7)]
    (tmp_path / "mine" / "x").write_text("real")
    assert os.listdir(tmp_path / "mine") == ["x"]


def test_caches_devices_and_new_temporary_files_are_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setenv("HF_HOME", str(cache))
    stop = files.start(files.environment(tmp_path / "aside"))
    try:
        (cache / "downloaded").write_text("1")
        Path("/dev/null").write_text("gone")
        (tmp_path / "__pycache__").mkdir()
    finally:
        stop()
    assert (cache / "downloaded").exists() and (tmp_path / "__pycache__").exists()
    assert files.written(tmp_path / "aside") == []


def test_copies_of_files_with_holes_have_the_holes(tmp_path: Path) -> None:
    stop = files.start(files.environment(tmp_path / "aside"))
    try:
        with open(tmp_path / "model", "wb") as file:
            for begin in (0, 1 << 28, 1 << 29):
                file.seek(begin)
                file.write(b"known")
            file.truncate(1 << 30)
        shutil.copyfile(tmp_path / "model", tmp_path / "best")
        with open(tmp_path / "model", "rb") as source, open(tmp_path / "ranged", "wb") as target:
            while os.copy_file_range(source.fileno(), target.fileno(), 1 << 30):
                pass
        for name in ("best", "ranged"):
            found = (tmp_path / name).stat()
            assert found.st_size == 1 << 30 and found.st_blocks * 512 < 1 << 20
            with open(tmp_path / name, "rb") as file:
                for begin in (0, 1 << 28, 1 << 29):
                    file.seek(begin)
                    assert file.read(7) == b"known\0\0"
    finally:
        stop()
    assert not list(tmp_path.glob("best"))


def test_the_users_preloaded_libraries_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/the/users.so:/and/another.so")
    names = files.environment(tmp_path / "aside")["LD_PRELOAD"].split(":")
    assert names[0].endswith(files.NAME) and names[1:] == ["/the/users.so", "/and/another.so"]


def test_a_cache_with_a_space_in_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "my cache"
    shutil.copytree(files.library().parent, cache / files.library().parent.name)
    files.library.cache_clear()
    monkeypatch.setenv("MAYA_CACHE_DIR", str(cache))
    monkeypatch.chdir(make(tmp_path / "mine"))
    try:
        variables = {**os.environ, **files.environment(tmp_path / "aside")}
    finally:
        files.library.cache_clear()
    done = subprocess.run(["sh", "-c", "echo x > made; cat made"], env=variables, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("x\n", "") and not Path("made").exists()


def test_a_program_below_a_cache_is_covered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = make(tmp_path / "large" / "project")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "large"))
    monkeypatch.chdir(mine)
    stop = files.start(files.environment(tmp_path / "aside"))
    try:
        (tmp_path / "large" / "downloaded").write_text("1")
        Path("log.txt").write_text("changed")
    finally:
        stop()
    assert (tmp_path / "large" / "downloaded").exists()
    assert (mine / "log.txt").read_bytes() == FOLDER["log.txt"]


def test_safetensors_of_values_that_are_known(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    save_file({"old": torch.ones(2)}, tmp_path / "mine.safetensors")
    before = (tmp_path / "mine.safetensors").read_bytes()
    with maya_core.emulate("h100"):
        for name in ("mine.safetensors", "new.safetensors"):
            save_file({"known": torch.arange(4)}, tmp_path / name)
            assert load_file(tmp_path / name)["known"].tolist() == [0, 1, 2, 3]
    assert (tmp_path / "mine.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["mine.safetensors"]


SAVES = """
import io, os, pickle, sys, numpy as np, torch
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    model(torch.randn(8, 64, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "data": torch.arange(5.0)}
    torch.save(state, "a.pt")
    with open("b.pt", "wb") as file:
        torch.save(state, file)
    torch.save(state, "c.tmp")
    os.replace("c.tmp", "c.pt")
    buffer = io.BytesIO()
    torch.save(state, buffer)
    open("d.pt", "wb").write(buffer.getvalue())
    pickle.dump({name: value.cpu().numpy() for name, value in model.state_dict().items()}, open("e.pkl", "wb"))
    np.save("f.npy", model.weight.detach().cpu().numpy())
    torch.jit.script(torch.nn.Linear(4, 4)).save("g.pt")
    torch.save(state, "h.pt", _use_new_zipfile_serialization=False)
    for name in ("a.pt", "b.pt", "c.pt", "d.pt", "h.pt"):
        read = torch.load(name, map_location="cpu" if step or name == "h.pt" else "cuda")
        assert read["step"] == step and read["data"].tolist() == [0, 1, 2, 3, 4], name
        model.load_state_dict(read["model"])
        optimizer.load_state_dict(read["optimizer"])
    assert pickle.load(open("e.pkl", "rb"))["weight"].shape == np.load("f.npy").shape == (64, 64)
print("saved and read", step + 1, "times")
"""


@pytest.mark.slow
def test_every_way_to_save_in_a_run(tmp_path: Path) -> None:
    names = ["a.pt", "b.pt", "c.pt", "d.pt", "e.pkl", "f.npy", "g.pt", "h.pt"]
    for name in names:
        (tmp_path / name).write_bytes(b"the user's own " + name.encode())
    (tmp_path / "train.py").write_text(SAVES)
    maya = str(Path(sys.executable).with_name("maya"))
    done = subprocess.run(
        [maya, "run", "--steps", "all", "--keep-files", "--", "python", "train.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "saved and read 3 times" in done.stdout
    assert "The program wrote 8 files" in " ".join(done.stdout.split())
    for name in names:
        assert (tmp_path / name).read_bytes() == b"the user's own " + name.encode()
    kept = tmp_path / "maya-out" / "latest" / "files" / tmp_path.relative_to("/")
    assert sorted(path.name for path in kept.iterdir()) == names


def test_weights_are_holes_in_checkpoints(tmp_path: Path) -> None:
    import torch

    with maya_core.emulate("h100") as job:
        model = torch.nn.Linear(8192, 8192).cuda()
        model(torch.randn(4, 8192, device="cuda")).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()  # from now on nobody knows the weights
        state = {"model": model.state_dict(), "known": torch.arange(4)}
        torch.save(state, tmp_path / "a.pt")
        with open(tmp_path / "b.pt", "wb") as file:
            torch.save(state, file)
        for name in ("a.pt", "b.pt"):
            found = (tmp_path / name).stat()
            assert found.st_size > 8192 * 8192 * 4 and found.st_blocks * 512 < 2**20
            read = torch.load(tmp_path / name, mmap=True)
            assert read["known"].tolist() == [0, 1, 2, 3]
            # What was not known before is not known afterwards: it is no zero.
            assert read["model"]["weight"].cuda().sum().item() != 0
    assert {each.path.name for each in job.files} == {"a.pt", "b.pt"}
    assert not list(tmp_path.iterdir())


def test_files_are_kept_only_in_a_folder_for_runs() -> None:
    with pytest.raises(maya_core.MayaError, match="no folder to keep them in"):
        maya_core.emulate("h100", keep_files=True)
