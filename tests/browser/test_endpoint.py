"""The public endpoint, as a program sees it. Needs no browser."""

import json
import urllib.request

import pytest
from fake_site import Site

from confu_core.trace import Settings, Trace

gradio_client = pytest.importorskip("gradio_client")


@pytest.fixture(scope="module")
def quick():
    site = Site(pause=0.0)
    yield site
    site.close()


def test_compare_by_client(quick):
    client = gradio_client.Client(quick.url, verbose=False)
    answer = client.predict("Why is the sky blue?", 24, 0.7, 3, 20, 4, 6, api_name="/compare")
    assert answer["identical"] is True
    assert answer["settings"]["nodes"] == 20 and answer["settings"]["temperature"] == 0.7
    assert {len(m["text"]) > 0 for m in answer["methods"].values()} == {True}
    assert answer["methods"]["confu"]["tau"] > 1


def test_a_program_gets_the_trace_that_the_page_shows(quick):
    client = gradio_client.Client(quick.url, verbose=False)
    answer = client.predict("Why?", 24, 0.0, 3, 20, 4, 6, True, api_name="/compare")
    trace = Trace.from_json(json.dumps(answer["trace"]))
    *_, last = quick.engine.compare(
        "Why?", Settings(max_new_tokens=24, seed=3, nodes=20, depth=4, top_k=6)
    )
    assert trace == last.trace


def test_only_the_endpoint_is_public(quick):
    client = gradio_client.Client(quick.url, verbose=False)
    info = client.view_api(return_format="dict")
    assert list(info["named_endpoints"]) == ["/compare"] and not info["unnamed_endpoints"]
    names = [p["parameter_name"] for p in info["named_endpoints"]["/compare"]["parameters"]]
    assert names == [
        "prompt", "max_new_tokens", "temperature", "seed", "nodes", "depth", "top_k",
        "trace", "methods",
    ]  # fmt: skip


def test_a_program_names_the_methods(quick):
    client = gradio_client.Client(quick.url, verbose=False)
    answer = client.predict(
        "Why?", max_new_tokens=12, methods="confu-lite, plain", api_name="/compare"
    )
    assert list(answer["methods"]) == ["plain", "confu-lite"] and answer["identical"] is True
    usual = client.predict("Why?", max_new_tokens=12, api_name="/compare")
    assert list(usual["methods"]) == ["plain", "eagle3", "confu"]


def test_a_method_without_a_head_is_an_error_only_if_it_was_named():
    site = Site(pause=0.0, unavailable=("confu",))
    try:
        client = gradio_client.Client(site.url, verbose=False)
        usual = client.predict("Why?", max_new_tokens=4, api_name="/compare")
        assert list(usual["methods"]) == ["plain", "eagle3"]
        with pytest.raises(Exception, match="No checkpoint was found"):
            client.predict("Why?", methods="confu", api_name="/compare")
    finally:
        site.close()


def test_errors_reach_the_caller(quick):
    client = gradio_client.Client(quick.url, verbose=False)
    with pytest.raises(Exception, match="no method junk"):
        client.predict("Why?", methods="plain,junk", api_name="/compare")
    with pytest.raises(Exception, match="between"):
        client.predict("Why?", 24, 0.0, 0, 0, 4, 6, api_name="/compare")
    with pytest.raises(Exception, match="empty"):
        client.predict(" ", api_name="/compare")


def test_compare_by_plain_http(quick):
    url = f"{quick.url}gradio_api/call/compare"
    body = json.dumps({"data": ["Why?", 16, 0.0, 0, 20, 4, 6, False, ""]}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    event = json.load(urllib.request.urlopen(request, timeout=30))["event_id"]
    stream = urllib.request.urlopen(f"{url}/{event}", timeout=60).read().decode()
    data = [line[6:] for line in stream.splitlines() if line.startswith("data: ")]
    assert json.loads(data[-1])[0]["identical"] is True
