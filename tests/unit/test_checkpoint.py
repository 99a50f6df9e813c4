"""Checkpoints: whole or not there at every fault, damage told by name, and nothing removed that is not ours."""

from __future__ import annotations

import json
import math
import random
import shutil
import tempfile
from collections import namedtuple
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_disk import ERRORS, KINDS, FaultyOs, Killed, disk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from trimtab import files
from trimtab.errors import RunError
from trimtab.train.checkpoint import CheckpointStore, Loaded

RUN_ID = "0123456789abcdef"
FILES = ("weights.safetensors", "optimizer.safetensors", "state.json", "manifest.json")


def store_of(run: Path, keep: int = 2) -> CheckpointStore:
    return CheckpointStore(run, RUN_ID, keep)


def tensors_of(value: float) -> dict[str, dict[str, Tensor]]:
    value = float(value)
    return {
        "weights": {"w": torch.full((3, 2), value), "b": torch.tensor(value, dtype=torch.bfloat16)},
        "optimizer": {"w.exp_avg": torch.full((3, 2), value / 2), "w.step": torch.tensor(value)},
    }


def save(store: CheckpointStore, step: int, *, value: float | None = None, best: bool = False) -> Path:
    number = float(step) if value is None else value
    saved = store.save(step, tensors_of(number), {"value": number}, metric=0.5 if best else None, is_best=best)
    assert saved.path.is_dir()
    return saved.path


def assert_whole(loaded: Loaded | None, step: int, value: float | None = None) -> None:
    assert loaded is not None
    number = float(step) if value is None else value
    assert (loaded.step, loaded.state) == (step, {"value": number})
    for group, named in tensors_of(number).items():
        assert loaded.tensors[group].keys() == named.keys()
        for name, tensor in named.items():
            assert loaded.tensors[group][name].dtype == tensor.dtype
            assert torch.equal(loaded.tensors[group][name], tensor)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(autouse=True)
def _quick_disk() -> Generator[None]:
    """No real flush: what it protects from is a power loss, which no test here imitates."""
    with disk(FaultyOs()):
        yield


@pytest.fixture
def quick_path(tmp_path: Path) -> Generator[Path]:
    """A folder in memory where the system has one: the hundreds of runs below need no real disk."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="trimtab-test-", dir=memory) as folder:
        yield Path(folder)


# ------------------------------------------------------------------------------------------------------- what is kept


def test_what_is_saved_comes_back_in_another_process_of_the_run(tmp_path: Path) -> None:
    saved = store_of(tmp_path).save(7, tensors_of(7), {"value": 7.0})
    store = store_of(tmp_path)
    assert_whole(store.newest(), 7)
    assert_whole(store.load(saved.path), 7)
    assert (saved.path.name, store.messages) == ("step-00000007", [])
    assert saved.bytes == sum((saved.path / name).stat().st_size for name in FILES[:3])
    assert saved.seconds > 0


def test_a_run_without_checkpoints_has_none(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    assert (store.newest(), store.best(), store.messages) == (None, None, [])
    assert not list(tmp_path.iterdir())


def test_tensors_of_every_kind_come_back_bit_by_bit(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    kinds = {
        "transposed": base.t(),
        "strided": base[:, ::2].bfloat16()[1:],
        "shares storage": base,
        "shares it too": base[1:],
        "expanded": torch.ones(1, 3).expand(5, 3),
        "0-d": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "half": torch.tensor([1e-7, 65504.0], dtype=torch.float16),
        "bool": base > 3,
        "int64": torch.tensor([-(2**62), 2**62]),
        "int8": torch.tensor([-128, 127, 5], dtype=torch.int8),
        "uint8": torch.tensor([0, 255], dtype=torch.uint8),
        "complex": torch.tensor([1 + 2j]),
        "trained": torch.nn.Parameter(torch.ones(2)),
        "字": torch.zeros(1),
    }
    store_of(tmp_path).save(1, {"weights": kinds, "optimizer": {}}, {})
    loaded = store_of(tmp_path).newest()
    assert loaded is not None
    assert loaded.tensors["optimizer"] == {}
    assert loaded.tensors["weights"].keys() == kinds.keys()
    for name, tensor in kinds.items():
        found = loaded.tensors["weights"][name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found, tensor.detach()), name


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_a_state_that_is_not_finite_is_never_saved_as_good(tmp_path: Path, bad: float, dtype: torch.dtype) -> None:
    store = store_of(tmp_path, keep=1)
    save(store, 1)
    before = tree(tmp_path)
    tensors = tensors_of(2)
    tensors["optimizer"]["w.exp_avg_sq"] = torch.tensor([1.0, bad, 2.0]).to(dtype)
    with pytest.raises(RunError, match=r"step 2 is not saved: optimizer w\.exp_avg_sq .* not finite") as caught:
        store.save(2, tensors, {})
    assert caught.value.cure
    with pytest.raises(RunError, match="not finite"):
        store.save(2, tensors_of(2), {"loss": bad})
    assert tree(tmp_path) == before


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    store = store_of(tmp_path, keep=2)
    for step in range(1, 8):
        save(store, step, best=step == 2)
    assert names(tmp_path) == ["index.json", "step-00000002", "step-00000006", "step-00000007"]
    assert_whole(store.best(), 2)
    save(store, 8, best=True)
    save(store, 9)
    assert names(tmp_path) == ["index.json", "step-00000008", "step-00000009"]
    assert_whole(store.best(), 8)
    assert store.messages == []


def test_order_is_that_of_saving_whatever_names_and_times_say(tmp_path: Path) -> None:
    store = store_of(tmp_path, keep=3)
    for step in (30, 10, 20):
        save(store, step)
    (tmp_path / "checkpoints" / "step-00000030" / "state.json").touch()
    assert_whole(store_of(tmp_path).newest(), 20)
    save(store_of(tmp_path, keep=2), 5)
    assert names(tmp_path) == ["index.json", "step-00000005", "step-00000020"]


@pytest.mark.parametrize("keep", [1, 3])
def test_a_step_saved_again_replaces_its_elder(tmp_path: Path, keep: int) -> None:
    store = store_of(tmp_path, keep=keep)
    save(store, 4, value=1.0)
    second = save(store, 4, value=2.0)
    assert_whole(store_of(tmp_path).newest(), 4, 2.0)
    assert names(tmp_path) == ["index.json", second.name]
    third = save(store, 4, value=3.0)
    assert_whole(store_of(tmp_path).newest(), 4, 3.0)
    assert names(tmp_path) == ["index.json", third.name]


def test_a_finding_of_damage_does_not_stick_to_a_name(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    save(store, 3)
    flip(save(store, 10) / "weights.safetensors", 900)
    store = store_of(tmp_path)
    assert_whole(store.newest(), 3)
    save(store, 6)  # the damaged folder goes, so its name is free
    assert names(tmp_path) == ["index.json", "step-00000003", "step-00000006"]
    assert save(store, 10).name == "step-00000010"
    assert_whole(store_of(tmp_path).newest(), 10)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    keep=st.integers(1, 3),
    moves=st.lists(
        st.one_of(
            st.tuples(st.just("save"), st.integers(1, 4), st.booleans()),
            st.tuples(st.sampled_from(["damage", "restart", "lose index", "kill"]), st.integers(1, 60), st.just(False)),
        ),
        max_size=12,
    ),
)
def test_the_newest_whole_one_is_always_found(quick_path: Path, keep: int, moves: list[tuple[str, int, bool]]) -> None:
    run = Path(tempfile.mkdtemp(dir=quick_path))
    store, last, value = store_of(run, keep), None, 0.0
    for move, number, best in moves:
        value += 1
        if move == "save":
            path, last = save(store, number, value=value, best=best), (number, value)
            assert path.is_dir()
            assert len([name for name in names(run) if name.startswith("step-")]) <= keep + 1
        elif move == "kill":
            with disk(FaultyOs("kill", number)):
                try:
                    save(store, 4, value=value)
                    last = (4, value)
                except Killed:
                    pass
            store = store_of(run, keep)
            found = store.newest()
            if found is not None and found.state == {"value": value}:
                last = (4, value)
        elif move == "damage":
            extra = run / "checkpoints" / "step-00000099"
            if not extra.exists():
                save(store, 99, value=value, best=best)
                flip(extra / "state.json", 3)
                found = store.newest()
                last = None if found is None else (found.step, found.state["value"])
        elif move == "lose index":
            (run / "checkpoints" / "index.json").unlink(missing_ok=True)
        else:
            store = store_of(run, keep)
        found = store.newest()
        assert (found and (found.step, found.state["value"])) == last, (move, store.messages)
    shutil.rmtree(run)


# ------------------------------------------------------------------------------------------------------- faults


def first_save(run: Path) -> CheckpointStore:
    return store_of(run, keep=1)


def with_rotation(run: Path) -> CheckpointStore:
    store = store_of(run, keep=2)
    for step in (1, 2, 3):
        save(store, step, best=step == 1)  # the fourth one makes the second go
    return store_of(run, keep=2)


def over_the_same_step(run: Path) -> CheckpointStore:
    store = store_of(run, keep=1)
    save(store, 9, value=1.0)
    return store_of(run, keep=1)


SCENES = {"first save": first_save, "rotation": with_rotation, "same step again": over_the_same_step}
Scene = Callable[[Path], CheckpointStore]


def operations_of(scene: Scene, run: Path) -> int:
    store = scene(run)
    with disk(FaultyOs()) as counted:
        save(store, 9)
    return counted.count


FAULTS = [*((kind, False) for kind in KINDS), *((kind, True) for kind in ERRORS)]


@pytest.mark.parametrize(("kind", "lasting"), FAULTS)
@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
def test_a_fault_at_any_operation_leaves_the_old_checkpoint_or_the_new(
    quick_path: Path, scene: Scene, kind: str, lasting: bool
) -> None:
    operations = operations_of(scene, quick_path / "count")
    assert operations >= 25
    for at in range(1, operations + 1):
        run = quick_path / str(at)
        store = scene(run)
        old, best = store.newest(), store.best()
        came_back = fault(store, FaultyOs(kind, at, lasting=lasting))
        again = store_of(run, keep=2)
        found = again.newest()
        if found is not None and found.state == {"value": 9.0}:
            assert_whole(found, 9)
        else:
            assert not came_back, f"operation {at}: the save came back, and is not there"
            assert (found and found.state) == (old and old.state), f"operation {at}"
        assert (again.best() and again.best().state) == (best and best.state), f"operation {at}"  # type: ignore[union-attr]
        assert again.messages == []
        assert_goes_on(again, run, at)
        shutil.rmtree(run)


def fault(store: CheckpointStore, faulty: FaultyOs) -> bool:
    """Saves step 9 on the faulty disk; True when the save came back."""
    with disk(faulty):
        try:
            save(store, 9)
        except Killed:
            return False
        except RunError as error:
            assert error.cure
            return False
    return True


def assert_goes_on(store: CheckpointStore, run: Path, at: int) -> None:
    """The step is done again after the restart, and nothing is left of the accident."""
    save(store, 9)
    assert_whole(store_of(run).newest(), 9)
    left = [name for name in names(run) if name != "index.json" and not name.startswith("step-")]
    assert left == [], f"operation {at}"


def test_nothing_is_renamed_before_it_is_flushed_nor_removed_before_the_new_name_is(tmp_path: Path) -> None:
    """What a power loss may take: bytes not flushed, and names in a folder that was not flushed since."""
    store = store_of(tmp_path, keep=1)
    save(store, 1)
    with disk(FaultyOs()) as watched:
        path = save(store, 2)
    opened: dict[int, Path] = {}
    unflushed: set[Path] = set()
    order: list[str] = []
    for name, arguments, result in watched.log:
        if name == "open":
            opened[result] = Path(arguments[0])
        elif name == "write":
            unflushed.add(opened[arguments[0]])
        elif name == "fsync":
            unflushed.discard(opened[arguments[0]])
            order.append(f"flush {opened[arguments[0]].name.partition('-step')[0]}")
        elif name in ("rename", "replace"):
            assert not unflushed, (name, arguments)
            order.append(f"to {Path(arguments[1]).name.partition('-step')[0]}")
    mark = store._mark
    there = order.index(f"to {path.name}")
    assert order[there - 2 : there] == ["to index.json", "flush checkpoints"], "the index names it first"
    assert order[there + 1] == "flush checkpoints"
    assert f"flush .tmp-{mark}" in order[:there]
    assert order.index(f"to .trash-{mark}") > there + 1


def test_a_failed_save_cleans_up_and_says_how_much_room_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(tmp_path, keep=1)
    save(store, 1)
    before = tree(tmp_path)
    with disk(FaultyOs("no space", 5)), pytest.raises(RunError, match=r"no space .* needed, .* free"):
        save(store, 2)
    assert tree(tmp_path) == before
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("trimtab.files.shutil.disk_usage", lambda path: usage(100, 90, 10))
    with pytest.raises(RunError, match=r"checkpoint of step 2 needs .* KiB .* only 10 B are free"):
        save(store, 2)
    assert tree(tmp_path) == before


def test_a_disk_that_gives_other_bytes_back_is_noticed_before_the_old_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(tmp_path, keep=1)
    save(store, 1)
    real = files.sha256_of
    monkeypatch.setattr(files, "sha256_of", lambda path: "0" * 64 if path.name == FILES[1] else real(path))
    with pytest.raises(RunError, match=r"step 2 was written, but .* optimizer\.safetensors has other content"):
        save(store, 2)
    monkeypatch.undo()
    assert_whole(store.load(tmp_path / "checkpoints" / "step-00000001"), 1)
    save(store, 3)
    assert_whole(store_of(tmp_path).newest(), 3)


# ------------------------------------------------------------------------------------------------------- damage


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-2]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\n "),
    "missing": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("file", FILES)
def test_every_damage_of_a_file_is_found_named_and_passed_over(tmp_path: Path, file: str) -> None:
    store = store_of(tmp_path)
    save(store, 1)
    path = save(store, 2)
    whole = (path / file).read_bytes()
    rng = random.Random(5)
    flips = {f"bit {bit}": bit for bit in rng.sample(range(len(whole) * 8), 60)}
    for name in [*DAMAGES, *flips]:
        if name == "longer" and file == "manifest.json":
            continue  # blanks after a JSON document change nothing in it
        DAMAGES[name](path / file) if name in DAMAGES else flip(path / file, flips[name])
        fresh = store_of(tmp_path)
        assert_whole(fresh.newest(), 1)
        assert [file in message and "step-00000002" in message for message in fresh.messages] == [True], name
        with pytest.raises(RunError, match=file):
            fresh.load(path)
        if (path / file).is_dir():
            (path / file).rmdir()
        (path / file).write_bytes(whole)
    assert_whole(store_of(tmp_path).newest(), 2)


def test_when_all_are_damaged_there_is_none_and_each_is_named(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    for step in (1, 2):
        flip(save(store, step) / "state.json", 3)
    assert store.newest() is None
    assert len(store.messages) == 2


@pytest.mark.parametrize("damage", [*DAMAGES, "other run", "flipped"])
def test_a_lost_index_is_built_anew_from_the_manifests(tmp_path: Path, damage: str) -> None:
    store = store_of(tmp_path, keep=2)
    for step in (5, 4, 3):
        save(store, step, best=step == 5)
    index = tmp_path / "checkpoints" / "index.json"
    if damage == "longer":
        index.write_bytes(b"[" + index.read_bytes())
    elif damage == "other run":
        index.write_bytes(files.sealed({"format": 1, "run_id": "x", "entries": []}))
    elif damage == "flipped":
        flip(index, 501)
    else:
        DAMAGES[damage](index)
    fresh = store_of(tmp_path, keep=2)
    assert_whole(fresh.newest(), 3)
    assert "anew" in fresh.messages[0]
    assert_whole(fresh.best(), 5)
    if damage != "a folder":
        save(fresh, 6)
        assert names(tmp_path) == ["index.json", "step-00000003", "step-00000005", "step-00000006"]
        assert store_of(tmp_path).newest() is not None
        assert fresh.messages == [] or "anew" in fresh.messages[0]


@pytest.mark.parametrize("entry", [{"sequence": "9"}, {"name": "../../../elsewhere"}, {"name": 5}, {"step": None}, {}])
def test_an_index_of_another_form_is_not_believed(tmp_path: Path, entry: dict[str, Any]) -> None:
    save(store_of(tmp_path), 4)
    fields = {"sequence": 9, "name": "step-00000009", "step": 9, "metric": None, "is_best": False} | entry
    entries = [fields if entry else {"name": "step-00000009"}]
    (tmp_path / "checkpoints" / "index.json").write_bytes(
        files.sealed({"format": 1, "run_id": RUN_ID, "entries": entries})
    )
    store = store_of(tmp_path)
    assert_whole(store.newest(), 4)
    assert "anew" in store.messages[0]


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    path = save(CheckpointStore(tmp_path / "a", "another", 1), 3)
    store = store_of(tmp_path / "b")
    with pytest.raises(RunError, match="another run"):
        store.load(path)
    with pytest.raises(RunError, match="not a folder"):
        store.load(tmp_path / "nothing")


# ------------------------------------------------------------------------------------------------ what is not ours


def link(path: Path, target: Path) -> None:
    try:
        path.symlink_to(target, target_is_directory=True)
    except OSError:
        pytest.skip("links are not allowed here")


def test_nothing_of_the_users_is_ever_removed(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    root = run / "checkpoints"
    ours = save(store_of(run, keep=3), 1)
    shutil.copytree(ours, root / "step-00000001-backup")
    shutil.copytree(ours, root / "step-00000777")
    shutil.copytree(ours, elsewhere / "step-00000666")
    link(root / "step-00000666", elsewhere / "step-00000666")
    link(root / "loop", root)
    link(root / f".tmp-{store_of(run)._mark}-step-x", elsewhere / "step-00000666")
    link(root / f".trash-{store_of(run)._mark}-step-x", elsewhere / "step-00000666")
    for name in ("checkpoint-good-DO-NOT-DELETE", "step-00000002", ".trash-mine", ".tmp-mine", "step-"):
        (root / name).mkdir()
        (root / name / "weights.safetensors").write_bytes(b"mine")
    (root / "step-00000003").write_bytes(b"a file named like one")
    decoys = {
        name: content
        for name, content in tree(tmp_path).items()
        if not name.startswith("run/checkpoints/step-00000001/")
    }
    decoys.pop(str(Path("run/checkpoints/index.json")))
    (root / "index.json").unlink()
    store = store_of(run, keep=1)
    for step in (1, 2, 3, 4, 666, 777):
        save(store, step, best=step == 2)
    assert_whole(store.newest(), 777)
    after = tree(tmp_path)
    assert {name: after.get(name) for name in decoys} == decoys
    assert (root / "loop").is_symlink()
    assert not ours.exists(), "what is ours went"


def test_a_checkpoint_with_a_file_of_the_users_in_it_stays(tmp_path: Path) -> None:
    store = store_of(tmp_path, keep=1)
    path = save(store, 1)
    (path / "notes.txt").write_text("dear diary", encoding="utf-8")
    before = tree(path)
    save(store, 2)
    assert tree(path) == before
    assert "notes.txt" in store.messages[0]


def test_a_checkpoint_swapped_for_a_link_is_not_followed(tmp_path: Path) -> None:
    store = store_of(tmp_path / "run", keep=1)
    path = save(store, 1)
    path.rename(tmp_path / "moved")
    link(path, tmp_path / "moved")
    before = tree(tmp_path / "moved")
    assert store_of(tmp_path / "run").newest() is None
    save(store, 2)
    assert path.is_symlink()
    assert tree(tmp_path / "moved") == before


@pytest.mark.parametrize("name", ["../../victim.txt", "/victim.txt", "state.json/../../../victim.txt", "victim.txt"])
def test_a_forged_manifest_removes_nothing_outside(tmp_path: Path, name: str) -> None:
    (tmp_path / "victim.txt").write_text("kept", encoding="utf-8")
    target = str(tmp_path / "victim.txt") if name.startswith("/") else name
    store = store_of(tmp_path, keep=1)
    forged = {"format": 1, "run_id": RUN_ID, "name": "step-00000001", "files": {target: {"bytes": 4, "sha256": ""}}}
    trash = tmp_path / "checkpoints" / f".trash-{store._mark}-step-00000001-x"
    ours = save(store, 1)
    trash.mkdir()
    for folder in (trash, ours):
        (folder / "manifest.json").write_bytes(files.sealed(forged))
        (folder / "victim.txt").write_text("kept too", encoding="utf-8")
    fresh = store_of(tmp_path, keep=1)
    save(fresh, 2)
    assert (tmp_path / "victim.txt").read_text(encoding="utf-8") == "kept"
    assert (trash / "victim.txt").exists()
    assert (ours / "victim.txt").exists()


def test_what_a_killed_process_left_is_removed_but_not_another_runs(tmp_path: Path) -> None:
    ours, theirs = store_of(tmp_path), CheckpointStore(tmp_path, "another run", 2)
    for store in (ours, theirs):
        with disk(FaultyOs("kill", 14)), pytest.raises(Killed):
            save(store, 1)
    assert len(names(tmp_path)) == 2
    save(store_of(tmp_path), 2)
    assert names(tmp_path) == [f".tmp-{theirs._mark}" + names(tmp_path)[0][21:], "index.json", "step-00000002"]


def test_the_files_are_plain_safetensors_and_json(tmp_path: Path) -> None:
    path = save(store_of(tmp_path), 1)
    assert sorted(p.name for p in path.iterdir()) == sorted(FILES)
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))["content"]
    assert (manifest["format"], manifest["run_id"], manifest["step"]) == (1, RUN_ID, 1)
    for name in FILES[:3]:
        assert manifest["files"][name] == {
            "bytes": (path / name).stat().st_size,
            "sha256": files.sha256_of(path / name),
        }
