"""fastea inside another program: streams that are stopped, left or crossed, many requests, unloading, conversations."""

import gc
import os
import threading

import pytest
import torch
from test_exact import build, make

import fastea
from fastea.config import FasteaError
from fastea.drafters.eagle import EagleDrafter
from fastea.loading import load
from fastea.tree import chain


def model():
    target, head = make()
    return build(target, EagleDrafter(head, chain(2)))


def test_a_callback_stops_within_one_round():
    """Case 33: asked to stop after 5 tokens."""
    generator = model()
    whole = generator.generate([1, 2, 3], max_new_tokens=60).ids
    asked = []

    def enough(outputs):
        asked.append(outputs[0].new_tokens)
        return outputs[0].new_tokens >= 5

    output = generator.generate([1, 2, 3], max_new_tokens=60, stop_when=enough)
    assert output.finish_reason == "interrupted" and output.ids == whole[: output.new_tokens]
    assert 5 <= output.new_tokens < 5 + len(generator.tree) and asked[-2] < 5 <= asked[-1]
    both = generator.generate(["a", "bc"], max_new_tokens=60, stop_when=lambda outputs: len(outputs[1].ids) > 3)
    assert {o.finish_reason for o in both} == {"interrupted"} and len(both[1].ids) > 3


def test_held_back_text_is_not_lost_by_a_stop():
    """The last characters could have begun a stop string."""
    target, _ = make()
    generator = build(target, None)
    text = generator.generate([1, 2, 3], max_new_tokens=12).text
    run = generator.stream(
        [1, 2, 3], max_new_tokens=60, stop=[text[:6] + "\0"], stop_when=lambda o: o[0].new_tokens >= 6
    )
    assert "".join(run) == run.outputs[0].text == text[:6]


def test_two_streams_at_once_are_refused():
    generator = model()
    alone = generator.generate([1, 2, 3], max_new_tokens=40)
    first = generator.stream([1, 2, 3], max_new_tokens=40)
    begun = next(first)
    for call in (lambda: generator.generate([4, 5]), lambda: next(generator.stream([4])), generator.close):
        with pytest.raises(FasteaError, match="one at a time"):
            call()
    caught = []

    def elsewhere():
        try:
            generator.generate([4, 5])
        except FasteaError as error:
            caught.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(caught) == 1
    assert begun + "".join(first) == alone.text and first.outputs[0].ids == alone.ids


@pytest.mark.parametrize("leave", ["interrupt", "drop"])
def test_an_abandoned_stream_leaves_the_model_clean(leave):
    generator = model()
    alone = generator.generate([4, 5], max_new_tokens=20).ids
    stream = generator.stream([1, 2, 3], max_new_tokens=40)
    for _ in range(3):
        next(stream)
    if leave == "interrupt":
        stream.interrupt()
        assert stream.outputs[0].finish_reason == "interrupted" and next(stream, None) is None
    else:
        del stream
    assert generator.generate([4, 5], max_new_tokens=20).ids == alone


def test_an_error_in_a_callback_leaves_the_model_clean():
    generator = model()
    alone = generator.generate([4, 5], max_new_tokens=20).ids
    with pytest.raises(ZeroDivisionError):
        generator.generate([1], stop_when=lambda outputs: 1 // 0)
    assert generator.generate([4, 5], max_new_tokens=20).ids == alone


def test_nothing_after_closing():
    generator = model()
    with torch.inference_mode():
        kept = generator.generate([1], max_new_tokens=3).ids
    assert generator.generate([1], max_new_tokens=3).ids == kept  # a caller's inference mode does not stick
    waiting = generator.stream([1])
    generator.close()
    generator.close()
    for call in (lambda: generator.generate([1]), lambda: next(waiting)):
        with pytest.raises(FasteaError, match="closed"):
            call()


def test_what_was_returned_stays():
    """Case 27: a short answer, then a long one in the same process; both as alone, the first untouched."""
    generator = model()
    outcomes = []
    first = generator.generate([1, 2, 3], max_new_tokens=6, observe=outcomes.append)
    kept = [[t.clone() for t in (o.emitted, o.count, o.path)] for o in outcomes]
    ids = list(first.ids)
    second = generator.generate([5, 6], max_new_tokens=200)
    assert second.new_tokens == 200 and second.ids == build(make()[0], None).generate([5, 6], max_new_tokens=200).ids
    assert first.ids == ids == build(make()[0], None).generate([1, 2, 3], max_new_tokens=6).ids
    for outcome, copies in zip(outcomes, kept, strict=True):
        assert all(map(torch.equal, (outcome.emitted, outcome.count, outcome.path), copies))


def tensor_bytes():
    gc.collect()
    tensors = [t for t in gc.get_objects() if _is_tensor(t)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if not t.is_mkldnn}
    storages |= {id(t): torch.ops.mkldnn._nbytes(t) for t in tensors if t.is_mkldnn}
    return sum(storages.values())


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _is_tensor(thing):
    return type(thing) in (torch.Tensor, torch.nn.Parameter)  # not a compiler's stand-in without data


@pytest.mark.parametrize("compile", [False, True])
def test_bytes_return_after_closing(folder, compile):
    """Case 33: three times loaded, used and closed."""
    before = tensor_bytes()
    for _ in range(3):
        generator = load(folder, compile=compile)
        generator.generate("hi", max_new_tokens=5)
        assert tensor_bytes() > before + 100_000
        generator.close()
        del generator
        assert tensor_bytes() <= before * 1.01 + 1000


def test_a_thousand_requests_without_growth():
    generator = model()
    prompts = [[1 + i % 60] * (1 + i % 70) for i in range(1000)]
    for i, prompt in enumerate(prompts):
        if i == 100:
            tensors, memory = tensor_bytes(), resident_bytes()
        generator.generate(prompt, max_new_tokens=3)
    assert tensor_bytes() == tensors and resident_bytes() < memory + 8e6


def test_no_globals_are_touched():
    """Case 33: the process is as it was."""
    before = (torch.get_rng_state().clone(), torch.get_default_dtype(), torch.get_num_threads(), dict(os.environ))
    model().generate([1, 2], temperature=1.0, max_new_tokens=8)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (torch.get_default_dtype(), torch.get_num_threads(), dict(os.environ))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 5}])
@pytest.mark.parametrize("path", ["fast", "exact"])
def test_a_conversation_equals_fresh_runs(folder, sampling, path):
    """Each turn's ids are those of a new model that is given all messages; only what is new is prefilled."""
    options = {"max_new_tokens": 24, **sampling}
    settings = {"dtype": "float32", "exact": path == "exact"}
    generator, fresh = load(folder, **settings), load(folder, **settings)
    chat = fastea.Chat(generator, system="be brief, be kind, and speak of many things as they come", **options)
    cached = []
    for text in ("hello there", "tell me more of it", "and then?"):
        messages = [*chat.messages, {"role": "user", "content": text}]
        said = "".join(chat.send(text))
        output = chat.run.outputs[0]
        assert output.ids == fresh.generate(messages, **options).ids and said == output.text
        assert chat.messages == [*messages, {"role": "assistant", "content": said}]
        cached.append(output.cached_tokens)
        assert output.cached_tokens < output.prompt_tokens
    assert cached[0] == 0 < cached[1] <= cached[2]
    if path == "exact":
        assert all(n % 64 == 0 for n in cached)
    chat.reset("another")
    "".join(chat.send("hello there"))
    assert chat.run.outputs[0].cached_tokens < 64 and len(chat.messages) == 3


def test_a_stopped_answer_stays_in_the_conversation(folder):
    generator = load(folder, dtype="float32")
    chat = fastea.Chat(generator, max_new_tokens=60, ignore_eos=True)
    pieces = chat.send("hello")
    begun = next(pieces) + next(pieces)
    pieces.close()
    assert chat.messages[-1]["role"] == "assistant" and chat.messages[-1]["content"].startswith(begun)
    "".join(chat.send("go on"))
    fresh = load(folder, dtype="float32").generate(chat.messages[:-1], max_new_tokens=60, ignore_eos=True)
    assert chat.run.outputs[0].ids == fresh.ids and chat.run.outputs[0].cached_tokens > 0
    with pytest.raises(FasteaError, match="the context 512"):
        "".join(chat.send("x" * 600))
    assert len(chat.messages) == 4 and "".join(chat.send("y"))


def test_reuse_is_for_one_prompt():
    with pytest.raises(FasteaError, match="one prompt at a time"):
        model().generate(["a", "b"], reuse=True)
