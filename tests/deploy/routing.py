"""Tests of three replicas behind SMG. Each test raises `Failure` or returns its figures."""

import dataclasses
import itertools
import threading
import time

from cluster import TRACEPARENT, Cluster, Failure, Request, send_all, wait_for

# The flags of the replicas. SMG needs about a second to notice that a replica drains.
FLAGS = ["--drain-delay", "3", "--drain-timeout", "60", "--max-sequences", "4"]
# A replica with one running and one waiting answer, and no delay when it drains.
SMALL = ["--drain-delay", "0", "--drain-timeout", "60", "--max-sequences", "1", "--queue", "1"]
LONG_ANSWER = 500
# Numerals of about five tokens each. Four such prompts fill 80 % of the KV cache of a demo server on a CPU.
LONG_PROMPT = 700
# SMG's own numbers: it checks /health and /v1/loads every second.
NOTICE_SECONDS = 2
TOPICS = ["tokens", "weights", "kernels", "blocks", "prompts", "layers"]
TOPICS += ["heads", "scales", "shards", "graphs", "streams", "queues"]
numbers = itertools.count(1)


@dataclasses.dataclass
class Size:
    """How much load the tests generate."""

    conversations: int = 9
    turns: int = 4
    prompts: int = 60
    clients: int = 6
    seconds: int = 3  # under load before and after each change
    rounds: int = 1  # restarts of all replicas
    is_long: bool = False  # also run the tests that take long


def require(condition, message):
    if not condition:
        raise Failure(message)


def unlike_prompt():
    """Returns the messages of a new conversation that shares no prefix with others."""
    number = next(numbers)
    topic = TOPICS[number % len(TOPICS)]
    return [{"role": "user", "content": f"{number * 7919 % 10007} {topic} {number}: what is a KV cache?"}]


def unlike_requests(cluster, count, name, **options):
    options = {"max_tokens": 16} | options
    return [Request(cluster.address, f"{name}-{next(numbers)}", unlike_prompt(), **options) for _ in range(count)]


def long_streams(address, count, name):
    """Starts streams that generate LONG_ANSWER tokens, and waits until all have begun."""
    streams = [
        Request(address, f"{name}-{next(numbers)}", unlike_prompt(), LONG_ANSWER, stream=True, to_the_end=True)
        for _ in range(count)
    ]
    for stream in streams:
        stream.start()
    for stream in streams:
        require(stream.answer.has_begun.wait(60), f"{stream.answer.id} has not begun within 60 s")
    return streams


def check_all_answered(answers):
    failed = [answer for answer in answers if not answer.is_whole]
    require(not failed, f"{len(failed)} of {len(answers)} requests failed: {failed[:3]}")


def figures(cluster, answers):
    """Returns what is reported about requests."""
    return {
        "requests": len(answers),
        "errors": sum(not answer.is_whole for answer in answers),
        "slowest_s": round(max(answer.seconds for answer in answers), 2),
        "shares": cluster.shares(answers),
    }


class Load:
    """Clients that send requests, one after the other, until the `with` block ends. Every second request streams."""

    def __init__(self, cluster, clients, name):
        self.cluster, self.name = cluster, name
        self.answers, self.is_over = [], False
        self.threads = [threading.Thread(target=self.client, daemon=True) for _ in range(clients)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.is_over = True
        for thread in self.threads:
            thread.join()

    def client(self):
        for turn in itertools.count():
            if self.is_over:
                return
            [request] = unlike_requests(self.cluster, 1, self.name, stream=turn % 2 == 1)
            request.run()  # on this thread
            self.answers.append(request.answer)


def conversations_stay(cluster, size):
    """Each conversation stays on the replica that has its prefix, and all replicas get conversations."""
    answers, used = [], set()
    found = [0]
    lock = threading.Lock()

    def converse():
        # SMG keeps a conversation only if at least 30 % of the text is known, so the first message is not short.
        first = next(numbers)
        numerals = " ".join(str((first * 7919 + index * 104729) % 10007) for index in range(40))
        messages, own = [{"role": "user", "content": f"{numerals}: what is a KV cache?"}], []
        for turn in range(size.turns):
            request = Request(cluster.address, f"conversation-{next(numbers)}", messages, 24)
            request.run()
            own.append(request.answer)
            messages = [
                *messages,
                {"role": "assistant", "content": request.answer.text},
                {"role": "user", "content": f"Question {turn}: and how does it grow?"},
            ]
        with lock:
            answers.extend(own)
            conversations.append(own)
            found[0] += sum(answer.cached_tokens > 0 for answer in own[1:])

    conversations = []
    # Three at once: if one replica has many more requests than the others, SMG moves a conversation on purpose.
    for _ in range(0, size.conversations, 3):
        threads = [threading.Thread(target=converse) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    check_all_answered(answers)
    for own in conversations:
        shares = cluster.shares(own)
        require(max(shares) == len(own), f"a conversation of {len(own)} turns moved: shares {shares}")
        used.add(shares.index(len(own)))
    require(len(used) == 3, f"only the replicas {sorted(used)} got conversations")
    later = len(conversations) * (size.turns - 1)
    require(found[0] == later, f"the prefix cache had the prefix of {found[0]} of {later} later turns")
    return figures(cluster, answers)


def unlike_prompts_spread(cluster, size):
    """Prompts without a common prefix spread over all replicas."""
    answers = send_all(unlike_requests(cluster, size.prompts, "spread"))
    check_all_answered(answers)
    result = figures(cluster, answers)
    require(min(result["shares"]) >= size.prompts // 6, f"the shares of {size.prompts} prompts are {result['shares']}")
    traces = {line.get("traceparent") for line in cluster.replicas[0].requests()}
    require(traces == {TRACEPARENT}, f"SMG changes traceparent: {traces}")
    return result


def client_leaves(cluster, _):
    """A client that closes its connection cancels its answer on the replica."""
    slowest = 0.0

    def running():
        return sum(replica.loads()["num_running_reqs"] for replica in cluster.replicas)

    for stream in (True, False):
        # Otherwise the answer seen below could be the one before, and the client would leave before it arrived.
        wait_for("no answer runs", lambda: running() == 0)
        request = Request(cluster.address, f"leave-{next(numbers)}", unlike_prompt(), 3000, stream, to_the_end=True)
        request.start()
        wait_for("the answer runs", lambda: running() == 1)
        if stream:
            request.answer.has_begun.wait(30)
        request.leave()

        def is_canceled(name=request.answer.id):
            lines = [line for replica in cluster.replicas for line in replica.requests() if line["id"] == name]
            return [line.get("finish") for line in lines] == ["canceled"]

        slowest = max(slowest, wait_for("a client that left is canceled", is_canceled, seconds=5))
        request.join()
    return {"requests": 2, "slowest_s": round(slowest, 2)}


def load_follows_reports(cluster, size):
    """A replica whose /v1/loads reports a queue gets no requests while it has one, and gets some afterwards."""
    busy = cluster.replicas[0]
    # Directly, so that SMG knows of this load from /v1/loads alone. 4 answers run, and SMG's limit is 8 that wait.
    requests = unlike_requests(cluster, 20, "direct", max_tokens=3000, stream=True, to_the_end=True)
    for request in requests:
        request.connection.host, request.connection.port = busy.address
        request.start()
    wait_for("the replica has a queue", lambda: busy.loads()["num_waiting_reqs"] >= 16)
    time.sleep(NOTICE_SECONDS)
    answers = send_all(unlike_requests(cluster, size.prompts // 2, "busy"))
    check_all_answered(answers)
    result = figures(cluster, answers)
    require(busy.loads()["num_waiting_reqs"] >= 8, "the queue became short before the test ended")
    require(result["shares"][0] == 0, f"a replica with a queue got requests: shares {result['shares']}")
    for request in requests:
        request.leave()
    for request in requests:
        request.join()
    wait_for("the queue is empty", lambda: busy.loads()["num_running_reqs"] == 0)
    time.sleep(NOTICE_SECONDS)
    after = figures(cluster, send_all(unlike_requests(cluster, size.prompts // 2, "idle")))
    require(after["shares"][0] > 0, f"a replica without a queue gets no requests: shares {after['shares']}")
    return result | {"shares_afterwards": after["shares"]}


def full_cache_gets_nothing(cluster, size):
    """A replica whose /v1/loads reports a KV cache that is 80 % full gets no requests, although no request waits."""
    busy = cluster.replicas[0]
    requests = []
    for _ in range(4):  # as many as run at once
        first = next(numbers)
        numerals = " ".join(str((first * 7919 + index * 104729) % 10007) for index in range(LONG_PROMPT))
        messages = [{"role": "user", "content": numerals}]
        requests.append(Request(busy.address, f"full-cache-{first}", messages, 4000, stream=True, to_the_end=True))
    for request in requests:
        request.start()
    wait_for("the KV cache is full", lambda: busy.loads()["token_usage"] >= 0.82, seconds=300)
    time.sleep(NOTICE_SECONDS)
    answers = send_all(unlike_requests(cluster, 20, "beside-a-full-cache", max_tokens=4))
    check_all_answered(answers)
    result, load = figures(cluster, answers), busy.loads()
    require(load["token_usage"] >= 0.8 and load["num_waiting_reqs"] == 0, f"the test ended too late: {load}")
    require(result["shares"][0] == 0, f"a replica with a full KV cache got requests: shares {result['shares']}")
    for request in requests:
        request.leave()
    for request in requests:
        request.join()
    wait_for("the KV cache is empty", lambda: busy.loads()["token_usage"] == 0)
    time.sleep(NOTICE_SECONDS)
    after = figures(cluster, send_all(unlike_requests(cluster, size.prompts // 2, "empty-cache")))
    require(after["shares"][0] > 0, f"a replica with an empty KV cache gets no requests: shares {after['shares']}")
    return result | {"token_usage": round(load["token_usage"], 2), "shares_afterwards": after["shares"]}


def busiest(cluster):
    """Returns the number of the replica that runs the most answers."""
    return max(range(3), key=lambda number: cluster.replicas[number].loads()["num_running_reqs"])


def drain_loses_nothing(cluster, size):
    """Streams of a replica that drains end whole, and it gets no requests after SMG has noticed."""
    streams = long_streams(cluster.address, 9, "drain")
    number = busiest(cluster)
    drained = cluster.replicas[number]
    drained.terminate()
    time.sleep(NOTICE_SECONDS)
    late = send_all(unlike_requests(cluster, size.prompts // 2, "late"))
    for stream in streams:
        stream.join()
    code = drained.wait()
    answers = [*late, *(stream.answer for stream in streams)]
    check_all_answered(answers)
    require(code == 0, f"the replica exited with code {code}")
    shares = cluster.shares(late)
    require(shares[number] == 0, f"a replica that drains got requests: shares {shares}")
    own = cluster.shares([stream.answer for stream in streams])[number]
    require(own > 0, "the replica had no stream when it began to drain")
    drained.start()
    wait_for("SMG knows three healthy replicas", lambda: cluster.healthy() == 3)
    return figures(cluster, answers)


def kill_costs_own_streams_only(cluster, size):
    """A replica that is killed under load costs only the streams that it had, and gets requests again."""
    streams = long_streams(cluster.address, 6, "kill")
    number = busiest(cluster)
    killed = cluster.replicas[number]
    with Load(cluster, size.clients, "under-kill") as load:
        killed.kill()
        time.sleep(size.seconds)
        killed.start()
        back = wait_for("SMG knows three healthy replicas", lambda: cluster.healthy() == 3)
        time.sleep(size.seconds)
    for stream in streams:
        stream.join()
    answers = [*load.answers, *(stream.answer for stream in streams)]
    cut = [answer for answer in answers if not answer.is_whole]
    require(cut, "the killed replica had no stream, so the test shows nothing")
    require(all(answer.status == 200 for answer in cut), f"requests failed that were no open streams: {cut[:3]}")
    served = cluster.shares(cut)
    require(served[number] == sum(served), f"streams of other replicas were cut: {served}")
    after = figures(cluster, send_all(unlike_requests(cluster, size.prompts, "after-kill")))
    require(after["errors"] == 0, f"{after['errors']} errors after the restart")
    back_share = after["shares"][number]
    require(back_share >= size.prompts // 6, f"the replica that is back got {back_share} requests")
    result = figures(cluster, answers)
    result["errors"] -= len(cut)
    return result | {"cut_streams": len(cut), "back_after_s": round(back, 2), "shares_afterwards": after["shares"]}


def rolling_restart(cluster, size):
    """A restart of all replicas, one after the other under load, has no errors."""
    with Load(cluster, size.clients, "rolling") as load:
        for replica in cluster.replicas * size.rounds:
            time.sleep(size.seconds)
            replica.terminate()
            code = replica.wait()
            require(code == 0, f"replica {replica.number} exited with code {code}")
            replica.start()
            wait_for("SMG knows three healthy replicas", lambda: cluster.healthy() == 3)
        time.sleep(size.seconds)
    check_all_answered(load.answers)
    return figures(cluster, load.answers) | {"restarts": 3 * size.rounds}


def replicas_follow_the_file(cluster, size):
    """Replicas that are added to the file get requests, and replicas that are removed from it get none."""

    def send_some(name):
        return send_all(unlike_requests(cluster, size.prompts // 2, name))

    cluster.list_replicas(cluster.replicas[:2])
    wait_for("SMG knows two healthy replicas", lambda: cluster.healthy() == 2)
    removed = send_some("removed")
    cluster.list_replicas(cluster.replicas)
    back = wait_for("SMG knows three healthy replicas", lambda: cluster.healthy() == 3)
    time.sleep(NOTICE_SECONDS)
    added = send_some("added")
    check_all_answered([*removed, *added])
    result, after = figures(cluster, removed), cluster.shares(added)
    require(result["shares"][2] == 0, f"a removed replica got requests: shares {result['shares']}")
    require(min(after) > 0, f"a replica that was added gets no requests: shares {after}")
    return result | {"back_after_s": round(back, 2), "shares_afterwards": after}


def full_replica_is_passed_over(cluster, _):
    """Requests that a full replica rejects with 429 are answered by others; if all are full, the client gets 429."""
    streams = fill(cluster.replicas[0])
    answers = []
    for _ in range(30):  # few enough to end before the answers that fill the replica
        answers += send_all(unlike_requests(cluster, 1, "full"))
    check_all_answered(answers)
    rejected = count_status(cluster.replicas[0], 429)
    require(rejected > 0, "the full replica rejected no request, so the test shows nothing")
    result = figures(cluster, answers)
    for replica in cluster.replicas[1:]:
        streams += fill(replica)
    [answer] = send_all(unlike_requests(cluster, 1, "all-full"))
    require(answer.status == 429 and "retry-after" in answer.headers, f"all replicas are full: {answer} {answer.headers}")
    for stream in streams:
        stream.leave()
    for stream in streams:
        stream.join()
    return result | {"rejected_429": rejected, "all_full_s": round(answer.seconds, 2)}


def draining_replica_is_passed_over(cluster, size):
    """Requests that a draining replica rejects with 503 are answered by others."""
    answers, replica = [], cluster.replicas[1]
    for _ in range(5):
        [stream] = long_streams(replica.address, 1, "hold")
        replica.terminate()
        wait_for("the replica drains", lambda: replica.health() == 503, pause=0.005)
        # SMG checks /health once a second, so the replica gets some of the requests.
        for _ in range(10):
            answers += send_all(unlike_requests(cluster, 1, "draining"))
        stream.join()
        require(replica.wait() == 0 and stream.answer.is_whole, "the replica did not complete its stream")
        replica.start()
        wait_for("SMG knows three healthy replicas", lambda: cluster.healthy() == 3)
        if count_status(replica, 503):
            break
    check_all_answered(answers)
    rejected = count_status(replica, 503)
    require(rejected > 0, "the draining replica rejected no request, so the test shows nothing")
    return figures(cluster, answers) | {"rejected_503": rejected}


def fill(replica):
    """Starts one answer that runs and one that waits on a replica with the flags SMALL."""
    streams = []
    for running, waiting in ((1, 0), (1, 1)):
        name = f"fill-{next(numbers)}"
        streams.append(Request(replica.address, name, unlike_prompt(), 3000, stream=True, to_the_end=True))
        streams[-1].start()
        counts = {"num_running_reqs": running, "num_waiting_reqs": waiting}
        wait_for("the replica is full", lambda counts=counts: counts.items() <= replica.loads().items())
    return streams


def count_status(replica, status):
    return sum(line["status"] == status for line in replica.requests())


# The flags of the replicas, whether SMG reads their addresses from a file, and the tests.
SUITES = {
    "load": (FLAGS, False, [conversations_stay, unlike_prompts_spread, client_leaves, load_follows_reports,
                            full_cache_gets_nothing, drain_loses_nothing, kill_costs_own_streams_only,
                            rolling_restart]),
    "file": (FLAGS, True, [conversations_stay, replicas_follow_the_file]),
    "rejections": (SMALL, False, [full_replica_is_passed_over, draining_replica_is_passed_over]),
}


LONG = [full_cache_gets_nothing]


def run(program, smg, folder, size, only=""):
    """Yields the name, the outcome and the seconds of each test. The outcome is a `Failure` or a dict of figures."""
    for suite, (flags, has_file, tests) in SUITES.items():
        tests = [test for test in tests if only in test.__name__ and (size.is_long or test not in LONG)]
        if not tests:
            continue
        with Cluster(program, smg, folder / suite, flags, has_file) as cluster:
            for test in tests:
                started = time.monotonic()
                try:
                    wait_for("SMG knows three healthy replicas", lambda: cluster.healthy() == 3)
                    outcome = test(cluster, size)
                except Failure as failure:
                    outcome = failure
                name = f"{test.__name__}_with_a_file" if has_file and test is conversations_stay else test.__name__
                yield name, outcome, time.monotonic() - started
                if isinstance(outcome, Failure):
                    break  # the replicas may not be as the next test needs them
