from uuid import uuid4

from celery import Celery, current_task
from celery.contrib.testing.worker import start_worker
from celery.exceptions import Reject

import semel

semel.configure(store="sqlite:///celery-semel.db")

app = Celery("shop", broker="memory://", backend="cache+memory://")
app.conf.update(task_acks_late=True, task_reject_on_worker_lost=True)

bank = []  # one line per effect


# --- by business key
@app.task(
    autoretry_for=(semel.InProgressError, semel.StoreUnavailableError),
    retry_backoff=5,
    max_retries=None,
)
@semel.idempotent(key="charge:{order}")
def charge(order, amount):
    return semel.step("charge", charge_card, order, amount)


def charge_card(order, amount):
    bank.append((order, amount, semel.current().child_key("charge")))
    return f"receipt {len(bank)}"


# --- by task id
def this_task(*_args, **_kwargs):
    return f"task:{current_task.request.id}"


@app.task
@semel.idempotent(key=this_task)
def remind(customer):
    bank.append((customer, "reminded"))
    return len(bank)


# --- redelivered
@app.task
@semel.idempotent(key="refund:{order}")
def refund(order):
    receipt = semel.step("refund", charge_card, order, -40)
    if semel.current().number == 1:
        # The broker takes the message back and delivers it again, as it does for a lost worker.
        raise Reject("the worker was lost", requeue=True)
    return receipt


def main():
    order, task = f"o-{uuid4()}", f"t-{uuid4()}"  # new ones: the ledger remembers the last run

    # Sent twice by an impatient caller: two messages, two task ids, one charge.
    one = charge.delay(order, 40)
    two = charge.delay(order, 40)
    assert one.get(timeout=10) == two.get(timeout=10) == "receipt 1"
    assert len(bank) == 1

    # One message delivered twice keeps its id; another message is another reminder.
    first = remind.apply_async(["ann"], task_id=task).get(timeout=10)
    again = remind.apply_async(["ann"], task_id=task).get(timeout=10)
    other = remind.apply_async(["ann"], task_id=f"{task}-2").get(timeout=10)
    assert (first, again, other) == (2, 2, 3)

    # Delivered, half done, given back, delivered again: the step is not repeated.
    assert refund.delay(order).get(timeout=10) == "receipt 4"
    assert len(bank) == 4

    # The same task called in place, as in tests with task_always_eager.
    assert charge.apply([order, 40]).get() == "receipt 1"


if __name__ == "__main__":
    with start_worker(app, perform_ping_check=False, loglevel="CRITICAL"):
        main()
