"""Switching models: one at a time, on demand, said before it happens, refused where it must be."""

import dataclasses
import threading
import weakref
from pathlib import Path

import pytest
from fake_engine import FakeEngine

from app.choices import Choice, of_preset
from app.form import CHOSEN
from app.runs import EngineSlot, Runs
from app.text import LANGUAGES, say
from confu_core import presets
from confu_core.errors import SettingsError, TargetError
from confu_core.presets import PRESETS, Machine
from confu_core.trace import Settings

SHORT = Settings(max_new_tokens=12)


def two(first=None, second=None):
    """A desk with two models; both are fakes unless a test brings its own."""
    first, second = first or FakeEngine(), second or FakeEngine(unavailable=("confu",))
    one = Choice("one", "Model One", lambda report: first)
    other = Choice("two", "Model Two", lambda report: second)
    return Runs(one, (other,)), first, second


def last(frames):
    *_, frame = frames
    return frame


def test_a_run_loads_the_model_that_was_chosen_and_lets_the_other_go():
    runs, first, second = two()
    assert not last(runs.stream("me", "en", "Why?", CHOSEN, SHORT, None, "one")).running
    assert runs.slot.engine is first
    last(runs.stream("me", "en", "Why?", CHOSEN, SHORT, None, "two"))
    assert runs.slot.engine is second and runs.slot.name == "two"
    assert list(runs.trace("me").lanes) == ["plain", "eagle3"]
    assert "Without a head for this model, so left out: ConFu" in runs.model_line("en")


class Warned(FakeEngine):
    """Its EAGLE-3 head looks wrong; the words come from a file that somebody else made."""

    @property
    def methods(self):
        found = super().methods
        words = "guesses <b>no better</b> than chance & more"
        return found | {"eagle3": dataclasses.replace(found["eagle3"], warnings=(words,))}


@pytest.mark.parametrize("language", LANGUAGES)
def test_what_looks_wrong_with_a_head_is_shown_where_it_was_loaded(language):
    runs, *_ = two(second=Warned())
    last(runs.stream("me", language, "Why?", CHOSEN, SHORT, None, "one"))
    quiet = runs.model_line(language)
    assert "progress-error" not in quiet
    last(runs.stream("me", language, "Why?", CHOSEN, SHORT, None, "two"))
    line = runs.model_line(language)
    words = "guesses &lt;b&gt;no better&lt;/b&gt; than chance &amp; more"
    said = say(language, "engine.warning", method="EAGLE-3", text="")
    assert f"{said}{words}" in line and "<b>" not in line
    assert line.count("role='alert'") == 1
    assert runs.choice_line("two", language) == line


def test_no_choice_means_the_model_that_is_there():
    runs, _, second = two()
    last(runs.stream("me", "en", "Why?", CHOSEN, SHORT, None, "two"))
    last(runs.stream("you", "en", "Why?", CHOSEN, SHORT))
    assert runs.slot.engine is second


def test_two_engines_are_never_held_at_once():
    held = []

    def source(number):
        def load(report):
            held.append(slot.engine)
            return number

        return load

    slot = EngineSlot([Choice(name, name, source(name)) for name in ("a", "b")])
    for name in ("a", "b", "a"):
        slot.start(name)
        slot.wait(5)
        assert slot.engine == name
    assert held == [None, None, None]


def test_a_choice_made_while_another_loads_waits_for_its_turn():
    gate = threading.Event()
    order = []

    def slow(report):
        gate.wait(5)
        order.append("one")
        return FakeEngine()

    def quick(report):
        order.append("two")
        return FakeEngine()

    runs = Runs(Choice("one", "One", slow), (Choice("two", "Two", quick),))
    runs.slot.start()
    frames = runs.stream("me", "en", "Why?", CHOSEN, SHORT, None, "two")
    assert "Loading the model One" in next(frames).progress
    gate.set()
    assert not last(frames).running
    assert order == ["one", "two"] and runs.slot.name == "two"


def test_what_cannot_run_is_refused_and_the_present_model_stays(monkeypatch):
    free_space = Machine("cpu", 16_000_000_000, True)
    monkeypatch.setattr(presets, "this_machine", lambda device: free_space)
    runs = Runs(
        Choice("own", "Own", lambda report: FakeEngine()), (of_preset(PRESETS["qwen3-8b"], "auto"),)
    )
    last(runs.stream("me", "en", "Why?", CHOSEN, SHORT))
    kept = runs.slot.engine
    frame = last(runs.stream("me", "en", "Why?", CHOSEN, SHORT, None, "qwen3-8b"))
    assert "this Space has none" in frame.progress and not frame.running
    assert runs.slot.engine is kept and runs.slot.state.phase == "ready"
    assert "this Space has none" in runs.choice_line("qwen3-8b", "en")


def test_a_model_that_fails_to_load_says_why_and_the_first_can_come_back():
    def broken(report):
        raise TargetError("The hub cannot be reached.")

    runs = Runs(Choice("one", "One", lambda report: FakeEngine()), (Choice("two", "Two", broken),))
    frame = last(runs.stream("me", "en", "Why?", CHOSEN, SHORT, None, "two"))
    assert "The hub cannot be reached." in frame.progress and runs.slot.engine is None
    assert not last(runs.stream("me", "en", "Why?", CHOSEN, SHORT, None, "one")).running
    assert runs.slot.state.phase == "ready"


def test_an_unknown_choice_is_refused():
    runs, *_ = two()
    with pytest.raises(SettingsError, match="no model 'junk'"):
        runs.slot.start("junk")
    assert "no model" in last(runs.stream("me", "en", "Why?", CHOSEN, SHORT, None, "junk")).progress


def test_what_a_preset_takes_is_said_before_it_is_loaded():
    choice = of_preset(PRESETS["llama-3.1-8b"], "auto")
    text = choice.about("en")
    assert "17 GB" in text and "left out: ConFu" in text and "Llama 3.1 Community License" in text
    assert "ConFu" not in of_preset(PRESETS[presets.DEFAULT], "auto").about("en")


def test_tokens_are_counted_as_the_prompt_is_written():
    runs, engine, _ = two()
    assert runs.count_line("Why?", 12, "en") == ""  # no model yet
    last(runs.stream("me", "en", "Why?", CHOSEN, SHORT))
    count = engine.count_tokens("Why is it so?")
    assert f"{count} of {engine.context} tokens" in runs.count_line("Why is it so?", 12, "en")
    assert runs.count_line("  ", 12, "en") == ""
    assert runs.count_line("Why?", None, "en")
    cut = runs.count_line("Why is it so?", engine.context - count + 1, "en")
    assert f"room for {engine.context - count} new" in cut and "progress-error" in cut


def test_a_prompt_beyond_the_context_is_a_warning():
    class Strict(FakeEngine):
        def count_tokens(self, prompt):
            raise SettingsError("The prompt has 9000 tokens; this target reads at most 8191.")

    runs, *_ = two(Strict())
    runs.slot.start()
    runs.slot.wait(5)
    assert "9000 tokens" in runs.count_line("word", 1, "en")


def resident() -> int:
    """Bytes of main memory that this process holds."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def test_switching_real_models_does_not_grow_memory(tmp_path):
    """Presets of two families, each with a published head, as the app loads and runs them."""
    from confu_core.checkpoints import save_checkpoint
    from confu_core.compare import load_target
    from confu_core.published import export_head
    from confu_core.sizes import TargetShape
    from tests.fakes import tiny_head, tiny_model, tiny_tokenizer

    def choice(name: str, kind: str) -> Choice:
        folder, ours, head = (str(tmp_path / name / part) for part in ("target", "ours", "head"))
        # Wide enough (35 MB) that one kept by mistake shows above the noise of the interpreter.
        model = tiny_model(kind, hidden_size=512, intermediate_size=1024)
        model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        target = load_target(folder, "cpu", "float32", lambda message, fraction: None)
        save_checkpoint(Path(ours), tiny_head(target), None, target, {})
        export_head(Path(ours), Path(head), "specforge", target)
        shape = TargetShape.from_config(model.config.to_dict())
        preset = presets.Preset(name, name, folder, shape, 48, "float32", {"eagle3": head})
        made = of_preset(preset, "cpu")

        def load(report):
            engine = made.load(report)
            loaded.append(weakref.ref(engine.target.model))
            heads.append(weakref.ref(engine.method("eagle3").checkpoint.head))
            return engine

        return dataclasses.replace(made, load=load)

    loaded: list[weakref.ref] = []
    heads: list[weakref.ref] = []
    runs = Runs(choice("llama", "llama"), (choice("qwen", "qwen3"),))
    weights = sum(p.stat().st_size for p in (tmp_path / "llama/target").glob("*.safetensors"))
    assert weights > 30_000_000
    levels = []
    for turn in range(8):
        name = ("llama", "qwen")[turn % 2]
        frame = last(
            runs.stream("me", "en", "The hen", CHOSEN, Settings(max_new_tokens=3), None, name)
        )
        assert not frame.running and list(runs.trace("me").lanes) == ["plain", "eagle3"]
        levels.append(resident())
    for alive in (loaded, heads):
        assert [part() is not None for part in alive] == [False] * 7 + [True]
    assert levels[-1] - levels[1] < weights
