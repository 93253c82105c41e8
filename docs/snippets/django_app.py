import json
from uuid import uuid4

from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.db import close_old_connections, connection, models, transaction
from django.db.models.signals import post_save
from django.http import JsonResponse
from django.test import RequestFactory
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from semel.guard import Recovered, Retry
from semel.http import Refusal, Response, Rule, WSGIMiddleware, attempt_of

settings.configure(
    ALLOWED_HOSTS=["*"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "django-shop.db"}},
    MIDDLEWARE=["django.middleware.csrf.CsrfViewMiddleware"],
    ROOT_URLCONF=__name__,
)
site = get_wsgi_application()  # first: no model can be imported or made before


# --- shop/models.py
class Order(models.Model):
    amount = models.IntegerField()
    key = models.UUIDField(unique=True, null=True)

    class Meta:
        app_label = "shop"

    def __str__(self):
        return f"order {self.id}"


# --- shop/views.py
@csrf_exempt
@transaction.atomic
def place_order(request):
    attempt = attempt_of(request)  # None without a key
    key = attempt.child_key("order") if attempt else None
    order = Order.objects.create(amount=json.loads(request.body)["amount"], key=key)
    return JsonResponse({"order": order.id}, status=201)


urlpatterns = [path("orders", place_order)]


# --- after a crash
def find_order(attempt):
    try:
        order = Order.objects.filter(key=attempt.child_key("order")).first()
    finally:
        close_old_connections()  # this is not inside a request of Django's
    if order is None:
        return Retry()
    body = json.dumps({"order": order.id}).encode()
    return Recovered(Response(201, ((b"content-type", b"application/json"),), body))


# --- wsgi.py
CUSTOMERS = {"Bearer ann-1": "ann", "Bearer bob-1": "bob"}


def customer_of(request):
    customer = CUSTOMERS.get(request.headers.get("authorization"))
    if customer is None:
        raise Refusal(Response(401, ((b"www-authenticate", b"Bearer"),), b""))
    return customer


application = WSGIMiddleware(
    site,
    store="sqlite:///django-semel.db",
    scope=customer_of,
    routes={"/orders": Rule(key="required", on_crash=find_order)},
)


# --- as clients see it
def post(said, key, token="Bearer ann-1"):
    headers = {"authorization": token, "idempotency-key": key}
    request = RequestFactory().post("/orders", said, "application/json", headers=headers)
    head = []
    answer = application(request.environ, lambda status, _headers, _=None: head.append(status))
    try:
        return int(head[0][:3]), b"".join(answer)
    finally:
        answer.close()


def stop_after_commit(**_):
    transaction.on_commit(stop)


def stop():
    raise KeyboardInterrupt


def main():
    if "shop_order" not in connection.introspection.table_names():
        with connection.schema_editor() as editor:
            editor.create_model(Order)

    key = f'"{uuid4()}"'  # a new one: the ledger remembers the last run
    first = post({"amount": 40}, key)
    assert first[0] == 201
    assert post({"amount": 40}, key) == first
    assert post({"amount": 41}, key)[0] == 422
    assert post({"amount": 40}, key, "Bearer bob-1") != first
    assert post({"amount": 40}, key, "Bearer nobody")[0] == 401

    # A worker is stopped when the order is committed, and its response is not recorded yet.
    orders, key = Order.objects.count(), f'"{uuid4()}"'
    post_save.connect(stop_after_commit, sender=Order)
    try:
        post({"amount": 5}, key)
    except KeyboardInterrupt:
        post_save.disconnect(stop_after_commit, sender=Order)
    status, body = post({"amount": 5}, key)
    assert (status, json.loads(body)) == (201, {"order": Order.objects.latest("id").id})
    assert Order.objects.count() == orders + 1


if __name__ == "__main__":
    main()
