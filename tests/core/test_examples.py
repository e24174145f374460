"""The programs under `examples/`, run as a user runs them, on the tiny target."""

from __future__ import annotations

import runpy
from pathlib import Path

from confu_core.trace import Trace

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_quickstart_decodes_observes_and_draws(folders, tmp_path, capsys):
    main = runpy.run_path(str(EXAMPLES / "quickstart.py"))["main"]
    parts = [f"--{name}={folders / name}" for name in ("target", "eagle3", "confu")]
    out = tmp_path / "run.json"
    main([*parts, "--prompt", "The hen", "--tokens", "12", f"--trace={out}"])
    printed = capsys.readouterr().out
    trace = Trace.from_json(out.read_text(encoding="utf-8"))
    rounds = trace.lanes["confu"].rounds[1:]
    assert f"confu: {trace.lanes['confu'].text!r}" in printed
    assert f"drafted per round: {[len(r.tree.token_ids) - 1 for r in rounds]}" in printed
    assert f"gained per round:  {[len(r.tokens) for r in rounds]}" in printed
    assert "same text: yes" in printed
    best = max(rounds, key=lambda record: len(record.tokens))
    drawing = printed.split("not reached):\n")[1].splitlines()
    assert len(drawing) == len(best.tree.token_ids)
    assert sum(line.startswith("+ ") for line in drawing) == len(best.path) + 1


def test_quickstart_without_heads_decodes_plainly(folders, capsys):
    main = runpy.run_path(str(EXAMPLES / "quickstart.py"))["main"]
    main([f"--target={folders / 'target'}", "--prompt", "The hen", "--tokens", "4"])
    printed = capsys.readouterr().out
    assert "plain: tau 1.00 in 3 target passes" in printed and "round " not in printed
