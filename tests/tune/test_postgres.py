"""A study on a real PostgreSQL server: tuners that join, leave, are killed, and a server that goes away."""

from __future__ import annotations

import collections
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from urllib.parse import quote

import pytest

from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import TuneError
from sparsegen.tune import server as servers
from sparsegen.tune.storage import open_storage
from sparsegen.tune.study import Study
from sparsegen.tune.tuner import Budget, TuningWarning, recorded, tune
from tests.tune.postgres_server import ESCAPED, PASSWORD, Server, programs, running
from tests.tune.standin import DEFAULT, InProcessLane, StandInSource

pytest.importorskip("psycopg", reason="needs the driver of PostgreSQL: the extra postgres")
pytestmark = pytest.mark.skipif(programs() is None, reason="needs PostgreSQL (initdb, pg_ctl)")

PRELUDE = f"""
import os, sys, time
sys.path[:] = {sys.path!r}
from tests.tune.standin import InProcessLane, StandInSource
from sparsegen.tune.tuner import Budget, tune
url, key, trials, slow_s, log = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5]
source = StandInSource(key=key, log=log, slow_s=slow_s)
"""
TUNE = """
print("here", flush=True)
sys.stdin.readline()
result = tune(source, budget=Budget(trials, 600), storage=url, lane=InProcessLane(source), seed=os.getpid())
assert not result.how.startswith("template default:"), result.how
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running() as one:
        yield one


def start(
    url: str, key: str, trials: int, slow_s: float = 0.0, log: object = ""
) -> subprocess.Popen[str]:
    """A tuner in a process of its own, ready to begin when a line is written to it."""
    arguments = map(str, (url, key, trials, slow_s, log))
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + TUNE, *arguments],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.readline() == "here\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def finished(process: subprocess.Popen[str]) -> None:
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert err == ""


def states(url: str, key: str) -> collections.Counter[str]:
    return collections.Counter(t.state for t in recorded(StandInSource(key=key), url).trials)


def test_four_tuners_share_the_trials_of_one_study(server, tmp_path):
    """B14 on a server: nobody measures what another has measured, and not one trial too many."""
    log = tmp_path / "log"
    processes = [start(server.url, "shared", 40, 0.01, log) for _ in range(4)]
    for process in processes:
        go(process)
    for process in processes:
        finished(process)
    assert states(server.url, "shared") == {"complete": 40}
    begins = [line for line in log.read_text().splitlines() if line.startswith("begin")]
    assert len(set(begins)) == 40 and len(begins) <= 40 + 4  # the winner against the baseline
    owners = {str(t.user_attrs["owner"]["pid"]) for t in frozen(server.url, "shared")}
    assert len(owners) > 1


def frozen(url: str, key: str):
    backend = open_storage(url).backend
    return backend.get_all_trials(backend.get_study_id_from_name(key))


def test_tuners_join_and_leave(server, tmp_path):
    first = start(server.url, "joined", 6, 0.1, tmp_path / "log")
    go(first)
    time.sleep(0.5)
    second = start(server.url, "joined", 12, 0.1, tmp_path / "log")
    go(second)
    finished(first)  # six are enough for it; the other goes on
    finished(second)
    assert states(server.url, "joined") == {"complete": 12}


def test_twenty_kills_at_random_points_lose_only_their_trials(server, tmp_path):
    """B23 on a server: SIGKILL wherever it falls, then one tuner goes on to the end."""
    chance, killed = random.Random(20), 0
    waiting = start(server.url, "killed", 60, 0.01, tmp_path / "log")
    for number in range(20):
        victim, waiting = (
            waiting,
            start(server.url, "killed", 60, 0.01, tmp_path / "log"),
        )  # the next one loads meanwhile
        go(victim)
        time.sleep(chance.uniform(0.0, 0.6) if number else 0.05)
        killed += victim.poll() is None
        victim.send_signal(signal.SIGKILL)
        victim.communicate()
    go(waiting)
    finished(waiting)
    counts = states(server.url, "killed")
    assert killed >= 15 and counts["complete"] == 60 and counts["running"] == 0
    # One is measured while the next is compiled: both go with the process, no more.
    assert counts["failed"] <= 2 * killed
    done = [t for t in recorded(StandInSource(key="killed"), server.url).trials if t.time_us]
    assert len({t.config for t in done}) == 60
    with servers.Turn(servers.address(server.url), 1.0).held("killed"):
        pass  # the dead hold no lock


def test_a_server_that_stops_hard_is_waited_for():
    with running() as server:
        process = start(server.url, "restart", 25, 0.05)
        go(process)
        while not (before := states(server.url, "restart")["complete"]) >= 1:
            time.sleep(0.1)
        assert before < 25
        server.stop()
        time.sleep(2.0)
        assert process.poll() is None
        server.start()
        finished(process)
        assert states(server.url, "restart")["complete"] == 25


def test_a_server_that_stays_away_gives_the_default_with_a_warning():
    source = StandInSource(key="gone", slow_s=0.2)
    with running() as server:
        threading.Timer(1.0, server.stop).start()
        with pytest.warns(TuningWarning, match="did not answer for more than 2 s") as caught:
            result = tune(
                source,
                budget=Budget(50, 600),
                storage=server.url,
                lane=InProcessLane(source),
                patience_s=2.0,
            )
    assert (result.config, result.time_us) == (DEFAULT, None)
    assert PASSWORD not in str(caught[0].message) and ESCAPED not in str(caught[0].message)


def test_a_silent_process_of_another_host_is_left_behind_after_its_heartbeats(server, monkeypatch):
    """A dead process here is seen at once; of another host only its silence is."""
    source = StandInSource(key="silent")
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    there = study(server.url, source)
    asked = there.ask(10)
    there.storage.close()  # silent from now on, as after a kill
    monkeypatch.undo()
    here = study(server.url, source)
    other = here.ask(10)
    assert other.config != asked.config  # still taken for alive
    monkeypatch.setattr(here.storage.backend, "grace_period", 1)
    time.sleep(1.5)
    again = here.ask(10)
    assert again.config == asked.config
    kinds = {t.number: t.kind for t in here.trials()}
    assert kinds[asked.number] == "left behind"
    # It was slow, not dead: its result comes too late and breaks nothing.
    there.drop(asked, "error", "too late")
    assert {t.number: t.kind for t in here.trials()} == kinds
    here.close()


def test_heartbeats_keep_a_slow_trial_of_another_host(server, monkeypatch):
    monkeypatch.setattr(servers, "_BEAT_S", 0.2)
    source = StandInSource(key="slow")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(socket, "gethostname", lambda: "elsewhere")
        there = study(server.url, source)
        asked = there.ask(10)
    here = study(server.url, source)
    monkeypatch.setattr(here.storage.backend, "grace_period", 2)
    time.sleep(3.5)
    assert here.ask(10).config != asked.config
    there.close()
    here.close()


def test_one_name_for_two_machines(server, monkeypatch):
    """All called localhost: another boot is another machine, whose trials are at work."""
    source = StandInSource(key="localhost")
    monkeypatch.setattr("sparsegen.tune.owner._boot", lambda: "another")
    there = study(server.url, source)
    asked = there.ask(10)
    monkeypatch.undo()
    here = study(server.url, source)
    assert here.ask(10).config != asked.config
    there.close()
    here.close()


def study(url: str, source: StandInSource) -> Study:
    from sparsegen.tune.space import Space

    storage = open_storage(url, 5.0)
    default = LaunchConfig.of(source.default.as_dict())
    return Study(storage, source.key, Space(source.knobs), default=default)


def test_the_lock_of_a_study_is_its_own(server):
    one, two = open_storage(server.url, 0.3), open_storage(server.url, 0.3)
    with one.locked("a"):
        with one.locked("a"):  # its owner may take it again
            pass
        with two.locked("b"):
            pass
        with (
            pytest.raises(TuneError, match="did not answer for more than 0 s|locked"),
            two.locked("a"),
        ):
            pass
    with two.locked("a"):
        pass
    one.close()
    two.close()


def closed_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def bad_addresses(port: int) -> dict[str, tuple[str, str]]:
    at = f"127.0.0.1:{port}"
    return {
        "password": (f"postgresql://tuner:wr0ng@{at}/postgres", "password authentication failed"),
        "password in the query": (
            f"postgresql://tuner@{at}/postgres?password=wr0ng",
            "password authentication failed",
        ),
        "database": (
            f"postgresql://tuner:{ESCAPED}@{at}/absent",
            'database "absent" does not exist',
        ),
        "user": (f"postgresql://nobody:wr0ng@{at}/postgres", "authentication failed"),
        "port": (f"postgresql://tuner:wr0ng@127.0.0.1:{closed_port()}/postgres", "refused"),
        "host": ("postgresql://tuner:wr0ng@nowhere.invalid/postgres", "nowhere.invalid"),
        "port no number": (f"postgresql://tuner:wr0ng@{at}x/postgres", "USER:PASSWORD@HOST:PORT"),
        "unescaped": ("postgresql://tuner:wr0ng/@:x@h:1/postgres", "USER:PASSWORD@HOST:PORT"),
        "keyword": (f"postgresql://tuner:wr0ng@{at}/postgres?colour=red", "colour"),
    }


@pytest.mark.parametrize("what", bad_addresses(1))
def test_a_wrong_address_is_one_sentence_without_the_password(server, what):
    url, words = bad_addresses(server.port)[what]
    with pytest.raises(TuneError) as caught:
        open_storage(url)
    text = str(caught.value)
    assert words in text and "\n" not in text
    assert "wr0ng" not in text and PASSWORD not in text and ESCAPED not in text


def test_a_server_that_never_answers_is_given_up(monkeypatch):
    monkeypatch.setattr(servers, "_CONNECT_S", 2)
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        begun = time.monotonic()
        with pytest.raises(TuneError, match="timeout"):
            open_storage(f"postgresql://tuner:x@127.0.0.1:{mute.getsockname()[1]}/postgres")
    assert time.monotonic() - begun < 60


def test_the_command_line_says_it_in_one_line(server):
    url = f"postgresql://tuner:wr0ng@127.0.0.1:{server.port}/postgres"
    done = subprocess.run(
        [sys.executable, "-m", "sparsegen", "report", "--studies", url, "--out", os.devnull],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and done.stdout == ""
    *told, error = done.stderr.splitlines()
    assert error.startswith("TuneError: cannot use postgresql://tuner:***@127.0.0.1")
    assert all(line.startswith("report ") for line in told) and "wr0ng" not in done.stderr


def test_the_driver_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(TuneError, match=r"pip install 'sparsegen\[postgres\]'") as caught:
        open_storage("postgresql://me:wr0ng@nowhere.invalid/x")
    assert "wr0ng" not in str(caught.value)


def test_passwords_hide_wherever_they_stand():
    url = servers.address(f"postgres://me:{quote('a b@c', safe='')}@h/x?passwd=q7&sslmode=require")
    text = servers.shown(url)
    assert text == "postgresql://me:***@h/x?passwd=***&sslmode=require"


def test_what_a_driver_repeats_of_a_password_is_hidden():
    url = servers.address(f"postgresql://me:{ESCAPED}@h/x?sslpassword=q7")
    error = RuntimeError("outer")
    error.__cause__ = ValueError(f"no {PASSWORD},\n  no {ESCAPED}\n and no q7")
    assert servers.failure(error, url) == "no ***, no *** and no ***"
