"""The key/value API of the published Python client (queen-mq 1.3.0), through the proxy.

    kv.py walk    URL HOST KEY OTHER_HOST OTHER_KEY   everything the API has, for two tenants
    kv.py blocked URL HOST KEY                        what a push-blocked tenant may still do

Ends with an assertion and a non-zero code where the client does not get what its documentation says.
"""

import asyncio
import sys
from datetime import datetime, timedelta, timezone

from queen import Queen
from queen.errors import KvError

NS = "python"


def same(what, got, want):
    """Fails with both values when they differ, also in type: 1 is not True, 3 is not 3.0."""
    assert (type(got), got) == (type(want), want), f"{what}: got {got!r}, want {want!r}"


def fields(what, result, **want):
    """Compares some members of a result."""
    for name, value in want.items():
        assert name in result, f"{what}: no {name} in {result!r}"
        same(f"{what}, {name}", result[name], value)


def instant(text):
    """A time of the wire; before Python 3.11 `fromisoformat` does not read every fraction."""
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S.%f%z" if "." in text else "%Y-%m-%dT%H:%M:%S%z")


async def refused(what, call, status, code, reason=None):
    """The call must raise the client's own error with this verdict."""
    try:
        result = await call
    except KvError as error:
        same(f"{what}, status", error.status, status)
        same(f"{what}, code", error.code, code)
        if reason is not None:
            same(f"{what}, reason", error.reason, reason)
        return error
    raise AssertionError(f"{what}: must raise, got {result!r}")


async def one_key(kv):
    miss = await kv.get(NS, "a/b c+ü")
    same("a miss", dict(miss), {"index": 0, "op": "get", "found": False, "key": "a/b c+ü"})
    assert not miss, "a miss is false"

    put = await kv.put(NS, "a/b c+ü", {"n": 1, "list": [True, None, "ü"]}, forever=True)
    fields("put", put, op="put", applied=True, key="a/b c+ü", value={"n": 1, "list": [True, None, "ü"]})
    assert put and "reason" not in put, f"an applied put: {put!r}"
    same("type of a version", type(put["version"]), int)

    got = await kv.get(NS, "a/b c+ü")
    fields("get", got, found=True, value=put["value"], version=put["version"], expiresAt=None)
    age = abs(datetime.now(timezone.utc) - instant(got["updatedAt"]))
    assert age < timedelta(minutes=1), f"updatedAt: {got['updatedAt']}"

    null = await kv.put(NS, "null", None, ttl_seconds=60)
    fields("put of null", null, applied=True, value=None)
    got = await kv.get(NS, "null")
    fields("get of null", got, found=True, value=None)
    left = instant(got["expiresAt"]) - instant(got["updatedAt"])
    same("lifetime", left, timedelta(seconds=60))

    gone = await kv.delete(NS, "null")
    fields("delete", gone, applied=True, value=None, version=null["version"])
    again = await kv.delete(NS, "null")
    fields("delete again", again, applied=False, reason="absent", value=None, version=0)
    assert not again, "a delete that hit nothing is false"


async def preconditions(kv):
    first = await kv.put_if_absent(NS, "idem", {"by": "a"}, ttl=timedelta(hours=1))
    fields("first claim", first, op="putIfAbsent", applied=True, value={"by": "a"})
    second = await kv.put_if_absent(NS, "idem", {"by": "b"}, until=datetime.now(timezone.utc) + timedelta(hours=1))
    fields("second claim", second, applied=False, reason="exists", value={"by": "a"}, version=first["version"])
    same("once, taken", await kv.once(NS, "idem", forever=True), False)
    same("once, free", await kv.once(NS, "once", ttl_seconds=60), True)

    version = first["version"]
    swapped = await kv.put(NS, "idem", 2, forever=True, expect=version)
    fields("swap", swapped, applied=True, value=2)
    stale = await kv.put(NS, "idem", 3, forever=True, expect=version)
    fields("stale swap", stale, applied=False, reason="version", value=2, version=swapped["version"])
    missing = await kv.put(NS, "nobody", 1, forever=True, expect=version)
    fields("swap of nothing", missing, applied=False, reason="absent", value=None, version=0)
    fields("expect 0", await kv.put(NS, "idem", 1, forever=True, expect=0), applied=False, reason="exists")
    fields("fenced delete", await kv.delete(NS, "idem", expect=version), applied=False, reason="version")

    # A lost `required` leaves no results; this client can only say so.
    lost = kv.put_if_absent(NS, "idem", 1, forever=True, required=True)
    await refused("lost required", lost, 500, "kv_result_missing")
    together = [
        kv.op.put(NS, "beside", 1, forever=True),
        kv.op.delete(NS, "idem", expect=version, required=True),
    ]
    same("batch with a lost required", await kv.batch(together), [])
    same("its other half", (await kv.get(NS, "beside"))["found"], False)
    fields("required that holds", await kv.delete(NS, "idem", expect=swapped["version"], required=True), applied=True)


async def counters(kv):
    for want in (1, 2, 3):
        fields("incr", await kv.incr(NS, "count", max=3, ttl_seconds=60), applied=True, value=want)
    fields("incr over max", await kv.incr(NS, "count", max=3, ttl_seconds=60), applied=False, reason="limit", value=3)
    fields("incr under min", await kv.incr(NS, "count", delta=-9, min=0, forever=True), applied=False, reason="limit")
    fields("negative delta", await kv.incr(NS, "count", delta=-3, forever=True), applied=True, value=0)
    await kv.incr(NS, "float", delta=0.1, forever=True)
    fields("0.1 + 0.2", await kv.incr(NS, "float", delta=0.2, forever=True), applied=True, value=0.3)
    await kv.put(NS, "text", "x", forever=True)
    fields("incr of a text", await kv.incr(NS, "text", forever=True), applied=False, reason="type", value=0)
    big = 2**70
    fields("a large integer", await kv.put(NS, "big", big, forever=True), value=big)


async def many_keys(kv):
    keys = [f"walk:{n:03}" for n in range(230)]
    for start in range(0, len(keys), 100):
        await kv.batch(kv.op.put(NS, key, {"key": key}, ttl_seconds=600) for key in keys[start:start + 100])
    await kv.put(NS, "walk%", "not under the prefix", forever=True)

    page = await kv.get_prefix(NS, "walk:")
    fields("a page", page, truncated=True, nextAfter=keys[99])
    same("its keys", [row["key"] for row in page["rows"]], keys[:100])
    page = await kv.get_prefix(NS, "walk:", after=keys[227], limit=5, keys_only=True)
    fields("the last page", page, truncated=False, nextAfter=None)
    same("its rows", [(row["key"], "value" in row) for row in page["rows"]], [(keys[228], False), (keys[229], False)])

    rows = await kv.list_all(NS, "walk:", limit=50)
    same("the whole walk", [row["key"] for row in rows], keys)
    same("its values", [row["value"]["key"] for row in rows], keys)
    same("a bounded walk", len(await kv.list_all(NS, "walk:", limit=50, max_rows=60)), 60)

    many = await kv.get_many(NS, [keys[3], "nope", keys[1], keys[3]])
    same("rows of get_many", [row["key"] for row in many["rows"]], [keys[1], keys[3], keys[3]])
    fields("get_many", many, missing=["nope"], truncated=False)


async def batches(kv):
    results = await kv.batch([
        kv.op.put(NS, "batch:1", 1, forever=True),
        kv.op.get(NS, "batch:1"),
        kv.op.get_many(NS, ["batch:1", "batch:2"]),
        kv.op.put_if_absent(NS, "batch:2", 2, forever=True),
        kv.op.incr(NS, "batch:3", delta=7, forever=True),
        kv.op.get_prefix(NS, "batch:", limit=10),
        kv.op.delete(NS, "nothing"),
    ])
    same("order", [(r["index"], r["op"]) for r in results], list(enumerate(
        ["put", "get", "getMany", "putIfAbsent", "incr", "getPrefix", "delete"])))
    same("truth", [bool(r) for r in results], [True, True, True, True, True, True, False])
    same("rows", [row["value"] for row in results[2]["rows"]], [1, 2])
    same("prefix", [row["value"] for row in results[5]["rows"]], [1, 2, 7])
    same("an empty batch", await kv.batch([]), [])


async def refusals(kv):
    await refused("bad namespace", kv.get("Upper", "k"), 400, "kv_bad_request", "kv_bad_namespace")
    await refused("long key", kv.put(NS, "k" * 513, 1, forever=True), 413, "payload_too_large", "kv_key_too_large")
    await refused("large value", kv.put(NS, "k", "v" * 70000, forever=True), 413, "payload_too_large", "kv_value_too_large")
    twice = [kv.op.put(NS, "k", 1, forever=True), kv.op.delete(NS, "k")]
    await refused("two writes of a key", kv.batch(twice), 400, "kv_bad_request", "kv_duplicate_key_in_call")
    error = await refused("no expiry", kv.batch([{"op": "put", "ns": NS, "key": "k", "value": 1}]), 400,
                          "kv_bad_request", "kv_expiry_not_specified")
    assert error.detail and "forever" in error.detail, f"detail for people: {error.detail!r}"


async def bundles(queen):
    """Transactions that carry key/value operations alone."""
    tx = queen.transaction().once(NS, "tx:mark", ttl_seconds=60)
    tx = tx.kv.put(NS, "tx:state", {"n": 1}, until=datetime.now(timezone.utc) + timedelta(hours=1))
    tx = tx.kv.incr(NS, "tx:count", delta=2, forever=True).kv.get(NS, "tx:state").kv.get_many(NS, ["tx:mark", "nope"])
    done = await tx.kv.delete(NS, "nothing").commit()
    assert done, f"committed: {done!r}"
    same("slots", [(r["index"], r["opIndex"], r["type"], r["op"]) for r in done["results"]], [
        (i, i, "kv", op) for i, op in enumerate(["putIfAbsent", "put", "incr", "get", "getMany", "delete"])])
    fields("counted", done["results"][2], applied=True, value=2)
    fields("read", done["results"][3], found=True, value={"n": 1}, version=done["results"][1]["version"])
    fields("read of many", done["results"][4], missing=["nope"])
    fields("lost without required", done["results"][5], applied=False, reason="absent")

    again = await queen.transaction().kv.put(NS, "tx:beside", 1, forever=True).once(NS, "tx:mark", forever=True).commit()
    assert not again, "a redelivery is false, and no error"
    fields("redelivery", again, success=False, ok=False, reason="kv_precondition", failedIndex=1, kvReason="exists",
           version=done["results"][0]["version"], value=done["results"][0]["value"], results=[])
    same("its other half", (await queen.kv.get(NS, "tx:beside"))["found"], False)

    push = queen.transaction().queue("q").push({"data": 1}).kv.put(NS, "tx:beside", 1, forever=True)
    for what, tx, word in [
        ("a push", push, "push"),
        ("two writes of a key", queen.transaction().kv.delete(NS, "k").kv.delete(NS, "k"), "kv_duplicate_key_in_call"),
    ]:
        try:
            result = await tx.commit()
        except Exception as error:
            assert word in str(error), f"{what}: {error}"
        else:
            raise AssertionError(f"{what} must raise, got {result!r}")
    same("nothing stored", (await queen.kv.get(NS, "tx:beside"))["found"], False)


async def two_tenants(own, other):
    await own.put(NS, "shared", "own", forever=True)
    same("the other sees nothing", (await other.get(NS, "shared"))["found"], False)
    fields("the same key is free", await other.put_if_absent(NS, "shared", "other", forever=True), applied=True)
    same("own value", (await own.get(NS, "shared"))["value"], "own")
    same("other's prefix", [row["value"] for row in await other.list_all(NS, "s")], ["other"])
    same("other's walk", await other.list_all(NS, "walk:"), [])
    await other.delete(NS, "shared")
    same("own value stays", (await own.get(NS, "shared"))["found"], True)


async def walk(url, host, key, other_host, other_key):
    async with client(url, host, key) as own, client(url, other_host, other_key) as other:
        for part in (one_key, preconditions, counters, many_keys, batches, refusals):
            await part(own.kv)
        await bundles(own)
        await two_tenants(own.kv, other.kv)
    async with client(url, host, other_key) as stranger:
        await refused("another tenant's key", stranger.kv.get(NS, "shared"), 403, "forbidden")
    async with client(url, host, "qk_live_nobody") as stranger:
        await refused("an unknown key", stranger.kv.get(NS, "shared"), 401, "unauthorized")


async def blocked(url, host, key):
    async with client(url, host, key) as queen:
        kv = queen.kv
        mixed = [kv.op.get(NS, "shared"), kv.op.put(NS, "new", 1, forever=True)]
        await refused("put", kv.put(NS, "shared", 1, forever=True), 403, "push_blocked")
        await refused("put_if_absent", kv.put_if_absent(NS, "new", 1, forever=True), 403, "push_blocked")
        await refused("incr", kv.incr(NS, "count", forever=True), 403, "push_blocked")
        await refused("mixed batch", kv.batch(mixed), 403, "push_blocked")
        fields("get", await kv.get(NS, "shared"), found=True, value="own")
        same("walk", len(await kv.list_all(NS, "walk:")), 230)
        same("get_many", (await kv.get_many(NS, ["shared", "new"]))["missing"], ["new"])
        fields("delete", await kv.delete(NS, "shared"), applied=True, value="own")


def client(url, host, key):
    return Queen(url=url, bearer_token=key, headers={"Host": host}, retry_attempts=1)


if __name__ == "__main__":
    asyncio.run({"walk": walk, "blocked": blocked}[sys.argv[1]](*sys.argv[2:]))
