"""Django behind the WSGI door: its responses, uploads, errors and signals."""

from __future__ import annotations

import http.client
import io
import json
import re
import subprocess
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import django
import pytest
from django.conf import settings
from django.core.exceptions import PermissionDenied
from django.core.signals import request_finished
from django.core.wsgi import get_wsgi_application
from django.http import FileResponse, Http404, HttpResponse, JsonResponse, StreamingHttpResponse
from django.urls import path
from werkzeug.test import Client

import semel
from semel.guard import Recovered, Retry
from semel.http import Refusal, Response, Rule, WSGIMiddleware, attempt_of
from semel.stores import MemoryStore, SQLiteStore
from support.threads import in_threads

KEY = {"Idempotency-Key": '"k"'}
BINARY = bytes(range(256)) * 40


# --- the site -----------------------------------------------------------------------------------

runs = Counter()
uploads = []


def order(request):
    runs["order"] += 1
    said = {"order": runs["order"], "read": request.body.decode(), "query": dict(request.GET)}
    response = JsonResponse(said, status=201, headers={"Location": "/orders/7"})
    response.set_cookie("seen", "1")
    return response


def attempt(request):
    found = attempt_of(request)
    if found is None:
        return HttpResponse("no key")
    assert found is semel.current()
    assert found is attempt_of(request.META)
    return HttpResponse(f"{found.tenant} {found.key}")


def upload(request):
    runs["upload"] += 1
    uploads.append((request.POST["name"], request.FILES["file"].read()))
    return HttpResponse("ok")


def stream(_request):
    def lines():
        for number in range(3):
            runs["stream"] += 1
            yield f"{semel.current().key} {number}\n"

    return StreamingHttpResponse(lines(), content_type="text/plain")


def file(_request):
    runs["file"] += 1
    return FileResponse(io.BytesIO(BINARY), content_type="application/octet-stream")


def large(_request):
    runs["large"] += 1
    return FileResponse(io.BytesIO(BINARY * 300), content_type="application/octet-stream")


def failing(request):
    runs["failing"] += 1
    if runs["failing"] == 1:
        raise ERRORS[request.GET["error"]]
    return HttpResponse("ok")


ERRORS = {"bug": ZeroDivisionError, "404": Http404, "403": PermissionDenied}


def stopped(_request):
    """Its effect is there, and then the worker is stopped."""
    runs["stopped"] += 1
    if runs["stopped"] == 1:
        raise KeyboardInterrupt
    return HttpResponse("ran again")


urlpatterns = [
    path(view.__name__, view)
    for view in (order, attempt, upload, stream, file, large, failing, stopped)
]


@pytest.fixture(scope="module")
def site():
    if settings.configured:  # a worker may come back to this module
        return get_wsgi_application()
    settings.configure(
        ALLOWED_HOSTS=["*"],
        ROOT_URLCONF=sys.modules[__name__],
        LOGGING_CONFIG=None,
        DEBUG_PROPAGATE_EXCEPTIONS=False,
    )
    django.setup()
    return get_wsgi_application()


@pytest.fixture(autouse=True)
def _afresh():
    runs.clear()
    uploads.clear()


@pytest.fixture
def door(site):
    """Make a door, and a client that closes what it got, as servers do."""

    def make(**options):
        options = {"scope": "shop", "store": MemoryStore()} | options
        return Client(WSGIMiddleware(site, **options))

    return make


def post(client, path, *, key='"k"', **options):
    headers = {**options.pop("headers", {}), "Idempotency-Key": key}
    return client.post(path, headers=headers, buffered=True, **options)


# --- responses ----------------------------------------------------------------------------------


def test_a_repeat_is_the_first_answer_and_no_409(door):
    client = door()
    first = post(client, "/order?a=1", data=b"{}")
    again = post(client, "/order?a=1", data=b"{}")
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.data == again.data
    assert first.json == {"order": 1, "read": "{}", "query": {"a": ["1"]}}
    assert again.headers["Location"] == "/orders/7"
    assert again.headers["Idempotent-Replayed"] == "true"
    assert "Set-Cookie" in first.headers
    assert "Set-Cookie" not in again.headers
    assert runs["order"] == 1


def test_another_body_or_query_is_refused(door):
    client = door()
    post(client, "/order?a=1", data=b"{}")
    assert post(client, "/order?a=1", data=b"[]").status_code == 422
    assert post(client, "/order?a=2", data=b"{}").status_code == 422
    assert runs["order"] == 1


def user_of(request):
    user, _, token = (request.header("authorization") or "").partition(" ")
    if not token:
        raise Refusal(Response(401, (), b""))
    return user


def test_users_are_apart_and_a_renewed_token_is_the_same_user(door):
    client = door(scope=user_of)

    def by(authorization):
        return post(client, "/order", headers={"Authorization": authorization})

    assert by("").status_code == 401  # and it stays with nobody
    assert by("alice old").json["order"] == 1
    assert by("bob old").json["order"] == 2
    assert by("alice new").json["order"] == 1
    assert runs["order"] == 2


def test_the_attempt_is_there_in_a_view(door):
    client = door()
    assert post(client, "/attempt").text == "shop k"
    assert client.post("/attempt").text == "no key"


def test_a_streaming_response_is_replayed(door):
    client = door()
    for _ in range(2):
        assert post(client, "/stream").text == "k 0\nk 1\nk 2\n"
    assert runs["stream"] == 3


def test_a_binary_file_is_replayed(door):
    client = door()
    for _ in range(2):
        answer = post(client, "/file")
        assert answer.data == BINARY
        assert answer.headers["Content-Type"] == "application/octet-stream"
    assert runs["file"] == 1


def test_a_large_file_arrives_whole(door):
    client = door()
    assert post(client, "/large").data == BINARY * 300
    assert post(client, "/large").status_code == 410
    assert runs["large"] == 1


def test_an_upload_is_larger_than_django_keeps_in_memory(door):
    content = BINARY * 300
    assert len(content) > settings.DATA_UPLOAD_MAX_MEMORY_SIZE
    head = b'--b\r\nContent-Disposition: form-data; name="name"\r\n\r\na\r\n--b\r\n'
    about = b'Content-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    body = head + about + content + b"\r\n--b--\r\n"
    client = door(rule=Rule(max_body=4_000_000))
    for _ in range(2):
        form = {"data": body, "content_type": "multipart/form-data; boundary=b"}
        assert post(client, "/upload", **form).data == b"ok"
    assert uploads == [("a", content)]


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "status"), [("bug", 500), ("404", 404), ("403", 403)])
def test_what_failed_may_be_tried_again(door, error, status):
    client = door()
    assert post(client, f"/failing?error={error}").status_code == status
    assert post(client, f"/failing?error={error}").data == b"ok"
    assert post(client, f"/failing?error={error}").headers["Idempotent-Replayed"] == "true"
    assert runs["failing"] == 2


def found(_attempt):
    return Recovered(Response(200, ((b"content-type", b"text/plain"),), b"found"))


def not_found(_attempt):
    return Retry()


@pytest.mark.parametrize(
    ("on_crash", "status", "body"),
    [("release", 200, b"ran again"), (found, 200, b"found"), (not_found, 200, b"ran again")],
)
def test_after_a_worker_was_stopped_the_rule_decides(door, on_crash, status, body):
    client = door(rule=Rule(on_crash=on_crash))
    with pytest.raises(KeyboardInterrupt):
        post(client, "/stopped")
    for _ in range(2):
        answer = post(client, "/stopped")
        assert (answer.status_code, answer.data) == (status, body)
    assert runs["stopped"] == (1 if on_crash is found else 2)


def test_after_a_worker_was_stopped_a_held_request_is_not_repeated(door):
    client = door(rule=Rule(on_crash="hold"))
    with pytest.raises(KeyboardInterrupt):
        post(client, "/stopped")
    answer = post(client, "/stopped")
    assert json.loads(answer.data)["type"] == "urn:semel:problem:outcome-unknown"
    assert runs["stopped"] == 1


def test_an_error_is_no_crash(door):
    client = door(rule=Rule(on_crash=found))
    assert post(client, "/failing?error=bug").status_code == 500
    assert post(client, "/failing?error=bug").data == b"ok"


# --- real requests ------------------------------------------------------------------------------


class ThreadingServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128


class Quiet(WSGIRequestHandler):
    def log_message(self, *_):
        pass


@contextmanager
def served(app):
    server = make_server("127.0.0.1", 0, app, ThreadingServer, Quiet)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def send(port, path):
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        line.request("POST", path, b"{}", KEY)
        answer = line.getresponse()
        return answer.status, answer.read()
    finally:
        line.close()


def test_fifty_at_once_are_one_execution(site, tmp_path):
    store = SQLiteStore(tmp_path / "semel.db")
    door = WSGIMiddleware(site, scope="shop", store=store, rule=Rule(wait=30))
    with served(door) as port:
        replies = in_threads(lambda: send(port, "/order"), 50)
    store.close()
    assert {status for status, _ in replies} == {201}
    assert {json.loads(body)["order"] for _, body in replies} == {1}
    assert runs["order"] == 1


def test_a_file_over_the_line_is_replayed(site):
    """Where the server offers `wsgi.file_wrapper`, Django answers with that."""
    door = WSGIMiddleware(site, scope="shop", store=MemoryStore())
    with served(door) as port:
        assert [send(port, "/file"), send(port, "/file")] == [(200, BINARY)] * 2
    assert runs["file"] == 1


@pytest.mark.parametrize("path", ["/order", "/stream", "/file", "/large", "/failing?error=bug"])
def test_a_request_is_finished_once(site, path):
    finished = []
    done = threading.Event()

    def finish(**_):
        finished.append(1)
        done.set()

    request_finished.connect(finish)
    try:
        with served(WSGIMiddleware(site, scope="shop", store=MemoryStore())) as port:
            send(port, path)
            assert done.wait(30)
    finally:
        request_finished.disconnect(finish)
    assert finished == [1]


# --- the page -----------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "use-it-with-django.md"

ASK = """
from django.core.management import call_command
from mysite.wsgi import application

call_command("makemigrations", "shop", verbosity=0)
call_command("migrate", verbosity=0)
from werkzeug.test import Client

client = Client(application)
headers = {"Authorization": "Bearer ann-1", "Idempotency-Key": "k"}
for _ in range(2):
    answer = client.post("/orders", json={"amount": 40}, headers=headers)
    print(answer.status_code, answer.text, answer.headers.get("Idempotent-Replayed"))
"""


def test_the_page_can_be_followed_in_a_new_project(tmp_path):
    head, model, imports, view, wsgi_head, wsgi, after_crash = re.findall(
        r"^```py(?:thon)?\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    python(tmp_path, "-m", "django", "startproject", "mysite", ".")
    python(tmp_path, "-m", "django", "startapp", "shop")
    (tmp_path / "shop" / "models.py").write_text(head + model)
    (tmp_path / "shop" / "views.py").write_text(imports + view + after_crash)
    (tmp_path / "mysite" / "wsgi.py").write_text(wsgi_head + wsgi)
    with (tmp_path / "mysite" / "settings.py").open("a") as file:
        file.write('INSTALLED_APPS += ["shop"]\n')
    with (tmp_path / "mysite" / "urls.py").open("a") as file:
        file.write("from shop.views import place_order\n")
        file.write('urlpatterns += [path("orders", place_order)]\n')
    said = python(tmp_path, "-c", ASK)
    assert said.splitlines() == ['201 {"order": 1} None', '201 {"order": 1} true']


def python(folder, *words):
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
