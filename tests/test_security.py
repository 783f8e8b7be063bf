"""SECURITY.md, line by line: what files of others cannot do."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from eagle_chain.engines import files, kernel_library
from eagle_chain.engines.cli import main
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.integrity import file_hash, sample_hash
from eagle_chain.engines.manifest import MANIFEST, Manifest
from eagle_chain.engines.staging import staged
from eagle_chain.export.weight_files import OTHER_FORMATS, read_header
from eagle_chain.runtime import load, open_engines
from tests.faults import SMALL, SMALL_DRAFT
from tests.standin import standins
from tests.toy_pair import write_pair

ROOT = Path(__file__).parent.parent
SOURCES = sorted(p for name in ("engines", "export", "runtime") for p in (ROOT / name).glob("*.py"))
FORBIDDEN_MODULES = {
    "pickle",
    "marshal",
    "shelve",
    "dill",
    "joblib",
    "cloudpickle",
    "yaml",
    "runpy",
}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "execfile"}
FORBIDDEN_ATTRIBUTES = {  # of a module
    "torch": {"load", "save", "hub"},
    "np": {"load"},
    "numpy": {"load"},
    "os": {"system", "popen"},
    "onnx": {"hub"},
}
MARK = "executed"


def export(pair: tuple[Path, Path], bundle: Path, *flags: str) -> int:
    words = ["--capacity", "32", "--aux-layers", "0,1,3", *flags]
    return main(["export", *map(str, pair), "-o", str(bundle), *words])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair and its bundle, for every test to have a copy of."""
    folder = tmp_path_factory.mktemp("made")
    sizes: dict[str, Any] = {"sizes": SMALL, "draft_sizes": SMALL_DRAFT}
    pair = write_pair(folder, layers=4, aux=[0, 1, 3], tokenizer=True, **sizes)
    assert export(pair, folder / "bundle", "--prefill", "0") == 0
    return folder


@pytest.fixture
def pair(made: Path, tmp_path: Path) -> tuple[Path, Path]:
    for role in ("trunk", "draft"):
        shutil.copytree(made / role, tmp_path / role)
    return tmp_path / "trunk", tmp_path / "draft"


@pytest.fixture
def bundle(pair: tuple[Path, Path], made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "bundle", tmp_path / "bundle", symlinks=True))


def edited(bundle: Path, change: Any) -> None:
    """Let `change` edit the manifest's JSON."""
    data = json.loads((bundle / MANIFEST).read_text())
    change(data)
    (bundle / MANIFEST).write_text(json.dumps(data))


# No pickle, no code ----------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_nothing_here_unpickles_or_evaluates(source: Path) -> None:
    for node in ast.walk(ast.parse(source.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        assert not {name.partition(".")[0] for name in names} & FORBIDDEN_MODULES, names
        harmless = ast.unparse(node) == "exec('pass')"  # what it is for: engines/entry.py
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not harmless:
            assert node.func.id not in FORBIDDEN_CALLS, f"line {node.lineno}: {node.func.id}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            wrong = FORBIDDEN_ATTRIBUTES.get(node.value.id, set())
            assert node.attr not in wrong, f"line {node.lineno}: {node.value.id}.{node.attr}"
        if isinstance(node, ast.keyword):
            off = isinstance(node.value, ast.Constant) and node.value.value is False
            wrong = node.arg in ("allow_pickle", "trust_remote_code", "shell")
            assert off or not wrong, node.value.lineno


def test_the_check_above_sees_what_it_is_for(tmp_path: Path) -> None:
    for i, line in enumerate(("import pickle", "exec('1')", "torch.load(x)", "f(allow_pickle=1)")):
        (tmp_path / f"{i}.py").write_text(line)
        with pytest.raises(AssertionError):
            test_nothing_here_unpickles_or_evaluates(tmp_path / f"{i}.py")


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("suffix", OTHER_FORMATS)
@pytest.mark.parametrize("role", [0, 1], ids=["trunk", "draft"])
def test_a_pickle_in_the_place_of_weights_is_not_opened(
    pair: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    suffix: str,
    role: int,
) -> None:
    mark = tmp_path / MARK
    (pair[role] / "model.safetensors").unlink()
    torch.save({"x": Bomb(mark)}, pair[role] / f"pytorch_model{suffix}")
    assert export(pair, tmp_path / "bundle") == 2
    assert "the weights are in pytorch_model" in capsys.readouterr().err
    pickled = pickle.dumps(Bomb(mark))  # and under the right name
    (pair[role] / "model.safetensors").write_bytes(pickled)
    assert export(pair, tmp_path / "bundle") == 2
    assert not mark.exists() and not (tmp_path / "bundle").exists()


def test_code_of_a_checkpoint_is_not_run(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Whatever a config says about Python files beside it."""
    mark = tmp_path / MARK
    body = f"open({str(mark)!r}, 'w')\n"
    for folder in pair:
        config = json.loads((folder / "config.json").read_text())
        config |= {"auto_map": {"AutoModel": "modeling_x.Model", "AutoConfig": "modeling_x.Config"}}
        config |= {"trust_remote_code": True, "custom_pipelines": {"x": {"impl": "modeling_x.P"}}}
        (folder / "config.json").write_text(json.dumps(config))
        for name in ("modeling_x.py", "sitecustomize.py", "onnx.py", "numpy.py", "tokenizers.py"):
            (folder / name).write_text(body)
    script = tmp_path / "bin" / "eagle-chain"  # as pip writes it
    script.parent.mkdir()
    script.write_text("import sys\nfrom eagle_chain.engines.cli import main\nsys.exit(main())\n")
    words = ["export", "trunk", "draft", "-o", "bundle", "--aux-layers", "0,1,3"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    for line, cwd in (
        (words, tmp_path),
        (["generate", str(tmp_path / "bundle"), "--prompt", "a", "--chat"], pair[0]),
    ):
        done = subprocess.run(
            [sys.executable, str(script), *line],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    assert not mark.exists()
    assert not list((tmp_path / "bundle").rglob("*.py"))


def test_a_library_in_a_bundle_is_never_loaded(bundle: Path, tmp_path: Path) -> None:
    """Only the user's own folder is asked for compiled kernels."""
    called = [
        (path.name, ast.unparse(node.args[0]))
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "build_cuda"
    ]
    assert called and {place for _, place in called} == {"cache_folder()"}
    opened = [
        f"{path.name}: {ast.unparse(node)}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith(("CDLL", "LoadLibrary", "load_library"))
        and not (node.args and ast.unparse(node.args[0]) == "None")  # this process itself
    ]
    assert opened == []


def test_the_folder_of_kernels_belongs_to_the_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = kernel_library.cache_folder()
    assert folder == tmp_path / "eagle-chain" and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(InputError, match="others may write into it"):
        kernel_library.cache_folder()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert kernel_library.cache_folder() == tmp_path / "home/.cache/eagle-chain"


@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="needs tensorrt-rtx-cu13"
)
def test_host_code_of_a_plan_is_not_allowed() -> None:
    """It would be allowed by a property of TensorRT's runtime, which nothing here sets."""
    import tensorrt_rtx

    assert hasattr(tensorrt_rtx.Runtime, "engine_host_code_allowed")
    assert not any("engine_host_code_allowed" in path.read_text() for path in SOURCES)


# Paths -----------------------------------------------------------------------------------------

ESCAPES = ["../x.safetensors", "/etc/passwd", "a/../../x", "..", ".", "", "a//b", "./a", "a\\b"]
ESCAPES += ["a\0b", "weights/trunk/../../../x.safetensors", "\ud800"]


@pytest.mark.parametrize("name", ESCAPES)
@pytest.mark.parametrize("table", ["files", "plans", "graphs"])
def test_a_manifest_names_nothing_outside(bundle: Path, table: str, name: str) -> None:
    entry: Any = "0" * 64
    if table == "files":
        entry = {"size": 100, "sha256": "0" * 64, "sample": "0" * 64}
    elif table == "plans":
        entry = {"sha256": "0" * 64, "flavour": "tensorrt", "version": "1", "gpu": ""}
        entry |= {"compute_capability": "9.0", "source": "", "weights": "bound", "options": []}
    edited(bundle, lambda data: data[table].update({name: entry}))
    with pytest.raises(InputError, match=r"manifest\.json: .*path .* is not a"):
        Manifest.load(bundle)


@pytest.mark.parametrize("name", [*ESCAPES, "sub/model.safetensors", "C:model.safetensors"])
def test_an_index_names_nothing_outside(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    names = list(read_header(pair[0] / "model.safetensors"))
    index = {"weight_map": {n: name if i else "model.safetensors" for i, n in enumerate(names)}}
    (pair[0] / "model.safetensors.index.json").write_text(json.dumps(index))
    assert export(pair, tmp_path / "bundle") == 2
    assert "wanted the name of a file in this folder" in capsys.readouterr().err


def test_a_graph_refers_to_the_weights_of_its_bundle_only(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even a graph whose hash was forged to fit."""
    (tmp_path / "secret").write_bytes(b"s" * 4096)
    for location in ("../secret", str(tmp_path / "secret"), "weights/../../secret"):
        model = onnx.load(bundle / "encoder.onnx", load_external_data=False)
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = location
        (bundle / "encoder.onnx").write_bytes(model.SerializeToString())
        digest = file_hash(bundle / "encoder.onnx")
        edited(bundle, lambda data, digest=digest: data["graphs"].update({"encoder.onnx": digest}))
        with standins():
            assert main(["build", str(bundle), "--weights", "baked"]) == 2
        assert "encoder.onnx: a weight lies in" in capsys.readouterr().err
        with pytest.raises(InputError, match=r"encoder\.onnx: "):
            load(bundle, "onnxruntime-cpu", threads=1)


def test_planted_links_lead_no_writing_away(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Links under the names that a write uses on its way, as in a folder that others share."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "mine").write_text("mine")
    (tmp_path / ".bundle.partial").symlink_to(victim)
    assert export(pair, tmp_path / "bundle") == 2
    (tmp_path / ".bundle.partial").unlink()
    (tmp_path / ".bundle.lock").symlink_to(victim / "lock")
    assert export(pair, tmp_path / "bundle") == 2
    assert capsys.readouterr().err.count("eagle-chain: ") == 2
    (tmp_path / ".bundle.lock").unlink()
    (tmp_path / "bundle").symlink_to(victim / "bundle")
    assert export(pair, tmp_path / "bundle") == 0  # a link of the user's own is followed
    assert sorted(os.listdir(victim)) == ["bundle", "mine"]
    (victim / "bundle" / "weights").rename(tmp_path / "weights")
    (victim / "bundle" / "weights").symlink_to(victim)
    with staged(victim / "bundle", lambda there: None) as folder:
        (folder / "x").touch()
    assert sorted(os.listdir(victim)) == ["bundle", "mine"]  # what a link led to was not removed


# Hashes ----------------------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_changed_graph_is_refused_before_onnx_runtime_sees_it(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("onnxruntime.InferenceSession", lambda *a, **b: seen.append(a))
    flip(bundle / "draft_step.onnx", 1000)
    with pytest.raises(InputError, match=r"draft_step\.onnx: was changed since the export"):
        open_engines(bundle, "onnxruntime-cpu")
    assert seen == []


def test_a_changed_plan_is_refused_before_tensorrt_sees_it(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with standins():
        assert main(["build", str(bundle)]) == 0
        import tensorrt

        seen: list[Any] = []
        monkeypatch.setattr(
            tensorrt.Runtime, "deserialize_cuda_engine", lambda self, data: seen.append(data)
        )
        [plan] = bundle.glob("plans/*/draft.plan")  # the first that is loaded
        flip(plan, 100)
        with pytest.raises(InputError, match=r"draft\.plan: is not the plan that was built"):
            open_engines(bundle, "tensorrt")
    assert seen == []


def test_an_empty_plan_is_refused_even_with_its_hash(bundle: Path) -> None:
    with standins():
        assert main(["build", str(bundle)]) == 0
        [plan] = bundle.glob("plans/*/draft.plan")
        plan.write_bytes(b"")
        name = str(plan.relative_to(bundle))
        edited(bundle, lambda data: data["plans"][name].update(sha256=file_hash(plan)))
        with pytest.raises(InputError, match=r"draft\.plan: is not the plan .* \(0 bytes"):
            open_engines(bundle, "tensorrt")


def test_changed_weights_are_refused_at_the_edges_and_found_by_a_check(bundle: Path) -> None:
    file = bundle / "weights/trunk/model.safetensors"
    whole = file.read_bytes()
    for at in (20, len(whole) - 1):
        flip(file, at)
        with pytest.raises(InputError, match="is not the file that was exported"):
            load(bundle, "onnxruntime-cpu")
        file.write_bytes(whole)
    assert main(["inspect", str(bundle), "--check"]) == 0
    digests = Manifest.load(bundle).files["weights/trunk/model.safetensors"]
    assert digests.sha256 == file_hash(file) and digests.sample == sample_hash(file)


# Sizes and things that are no files ------------------------------------------------------------


def sparse(path: Path, size: int) -> None:
    path.unlink(missing_ok=True)
    with open(path, "wb") as stream:
        stream.truncate(size)


FILES = {  # what is put in the place of a file, and who reads it
    "trunk/config.json": "export",
    "draft/config.json": "export",
    "trunk/model.safetensors": "export",
    "bundle/manifest.json": "generate",
    "bundle/trunk.onnx": "generate",
    "bundle/tokenizer/tokenizer.json": "generate",
    "bundle/tokenizer/tokenizer_config.json": "generate",
    "bundle/tokenizer/chat_template.jinja": "generate",
    "prompt.txt": "generate",
    "text.txt": "verify",
}
LINES = {
    "export": "export trunk draft -o new --aux-layers 0,1,3",
    "generate": "generate bundle --chat --max-new-tokens 1 --threads 1 --prompt-file prompt.txt",
    "verify": "verify bundle --text text.txt",
}
TRIES = """
import contextlib, io, json, os, resource, signal, sys
from eagle_chain.engines.cli import main
resource.setrlimit(resource.RLIMIT_AS, (3 << 29, 3 << 29))
found = []
for name, kind, line in json.loads(sys.argv[1]):
    os.rename(name, "kept") if os.path.exists(name) else None
    if kind == "huge":
        with open(name, "wb") as stream: stream.truncate(1 << 42)
    elif kind == "pipe": os.mkfifo(name)
    elif kind == "device": os.symlink("/dev/zero", name)
    else: os.mkdir(name)
    signal.alarm(10)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main(line.split())
    found.append((code, said.getvalue()))
    os.rmdir(name) if kind == "folder" else os.unlink(name)
    os.rename("kept", name) if os.path.exists("kept") else None
print(json.dumps(found))
"""


def test_what_is_too_large_or_no_file_is_refused_at_once(bundle: Path, tmp_path: Path) -> None:
    """In 1.5 GB of address space and ten seconds each; a prompt may come through a pipe."""
    (tmp_path / "prompt.txt").write_text("a")
    cases = [
        (name, kind, LINES[reader])
        for name, reader in FILES.items()
        for kind in ("huge", "pipe", "device", "folder")
        if not (kind == "pipe" and name.endswith(".txt"))
    ]
    words = [sys.executable, "-c", TRIES, json.dumps(cases)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for (name, kind, _), (code, said) in zip(cases, json.loads(done.stdout), strict=True):
        if name.endswith(".jinja") and kind != "huge":  # no file: the config has a template too
            assert code == 0, said
            continue
        assert code == 2 and said.count("eagle-chain: ") == 1, f"{name}, {kind}: {said}"
        assert "not enough memory" not in said, f"{name}, {kind}: {said}"
    assert not (tmp_path / "new").exists()


def test_sizes_in_a_header_are_compared_before_anything_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    sparse(path, 1 << 42)
    with open(path, "r+b") as stream:
        stream.write((1 << 40).to_bytes(8, "little"))
    with pytest.raises(
        InputError, match="declares a header of 1099511627776 bytes, wanted at most"
    ):
        read_header(path)
    os.truncate(path, 200 << 20)
    assert sample_hash(path)  # a header as long as the file, never held whole
    with pytest.raises(OSError, match=r"larger than 67\.1 MB"):
        files.read_plain(path)


# The page itself -------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [None, "0"])
def test_onnxruntime_leaves_no_id_of_the_machine(tmp_path: Path, said: str | None) -> None:
    """It does when the user says so, which shows that the first case could fail.

    The child gets variables of its own: where CI=true is set, ONNX Runtime writes nothing anyhow.
    """
    environment = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    environment |= {"ORT_DISABLE_TELEMETRY": said} if said else {}
    code = "from eagle_chain.runtime.ort import onnxruntime; onnxruntime()"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
    assert bool(list(tmp_path.rglob("deviceid"))) == (said == "0")


def test_limits_of_the_page_are_those_of_the_code() -> None:
    from eagle_chain.export.weight_files import LARGEST_HEADER
    from eagle_chain.runtime import chat, generate

    page = (ROOT / "SECURITY.md").read_text()
    for words in (
        f"has {chat.SECONDS} seconds, {chat.MEMORY >> 30} GB",
        f"JSON files are read up to {files.LARGEST_TEXT >> 20} MB",
        f"safetensors headers up to {LARGEST_HEADER // 10**6} MB",
        f"prompts up to {generate.LARGEST_PROMPT >> 20} MB",
    ):
        assert words in re.sub(r"\s+", " ", page), words


def test_nothing_of_a_tree_is_left_behind(bundle: Path, tmp_path: Path) -> None:
    """A bundle holds what the manifest names, the tokenizer and links: nothing that runs."""
    names = {p.name for p in bundle.rglob("*") if p.is_file()}
    assert {Path(n).suffix for n in names} <= {".json", ".onnx", ".jinja", ".safetensors"}
    shutil.rmtree(bundle)
