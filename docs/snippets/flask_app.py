from uuid import uuid4

import sqlalchemy as sa
from flask import Flask, request
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from semel.http import Refusal, Response, Rule, WSGIMiddleware, attempt_of
from semel.stores import SQLStore

# --- the door
CUSTOMERS = {"Bearer ann-1": "ann", "Bearer bob-1": "bob"}


def customer_of(request):
    customer = CUSTOMERS.get(request.headers.get("authorization"))
    if customer is None:
        raise Refusal(Response(401, ((b"www-authenticate", b"Bearer"),), b""))
    return customer


engine = sa.create_engine("sqlite:///flask-shop.db")

app = Flask(__name__)
app.wsgi_app = WSGIMiddleware(
    app.wsgi_app,
    store=SQLStore(engine, create=True),
    scope=customer_of,
    routes={"/orders": Rule(key="required"), "/search": None},
)


# --- an outside call
bank = []  # stands for your payment provider: one line per charge


@app.post("/charges")
def charge():
    amount = request.get_json()["amount"]
    attempt = attempt_of(request)  # None without a key
    if attempt is None:
        return {"receipt": charge_card(amount, None)}, 201
    receipt = attempt.step("charge", charge_card, amount, attempt.child_key("charge"))
    return {"receipt": receipt}, 201


def charge_card(amount, key):
    bank.append((amount, key))
    return f"receipt {len(bank)}"


# --- rows
class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "flask_orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    amount: Mapped[int]


Base.metadata.create_all(engine)


@app.post("/orders")
def place_order():
    session = Session(engine)
    attempt_of(request).bind(session)  # committed with the response, or not at all
    order = Order(amount=request.get_json()["amount"])
    session.add(order)
    session.flush()
    return {"order": order.id}, 201


# --- as clients see it
def main():
    client = app.test_client()
    key = f'"{uuid4()}"'  # a new one: the ledger remembers the last run
    ann = {"Authorization": "Bearer ann-1", "Idempotency-Key": key}

    def post(path, said, headers=ann):
        return client.post(path, json=said, headers=headers)

    first, again = post("/orders", {"amount": 40}), post("/orders", {"amount": 40})
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.data == again.data
    assert again.headers["Idempotent-Replayed"] == "true"
    assert post("/orders", {"amount": 41}).status_code == 422

    bob = ann | {"Authorization": "Bearer bob-1"}
    assert post("/orders", {"amount": 40}, bob).json != first.json
    assert post("/orders", {"amount": 40}, ann | {"Authorization": ""}).status_code == 401
    without_key = {"Authorization": "Bearer ann-1"}
    assert post("/orders", {"amount": 40}, without_key).status_code == 400

    another = ann | {"Idempotency-Key": f'"{uuid4()}"'}
    for _ in range(2):
        assert post("/charges", {"amount": 5}, another).json == {"receipt": "receipt 1"}
    assert len(bank) == 1


if __name__ == "__main__":
    main()
