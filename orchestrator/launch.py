"""Wires one driver: cluster, claim, checks, data, actors, controller; then the report. The only place that does.

Order matters: nothing is written under the Run's URL before this driver is the only one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import ray
from ray.autoscaler.sdk import request_resources

from orchestrator.claim import claim_run
from orchestrator.config import RunConfig
from orchestrator.controller import Controller, RunEnd
from orchestrator.coordinator_actor import utc_now
from orchestrator.coordinator_client import CoordinatorClient
from orchestrator.data_check import ensure_dataset
from orchestrator.driver_lease import LEASE_TTL_S, DriverLease
from orchestrator.driver_record import DriverRecord
from orchestrator.errors import ConfigError, cannot_start
from orchestrator.exit_codes import ExitCode
from orchestrator.finished import has_whole_end
from orchestrator.found_cluster import finds_cluster
from orchestrator.journal import Journal
from orchestrator.keepers import KeeperCrew
from orchestrator.lifelines import Lifelines
from orchestrator.meeting_point import MeetingPoint
from orchestrator.node_watcher import NodeWatcher
from orchestrator.options import DriverOptions
from orchestrator.own_python import hiding_files, ray_environment
from orchestrator.preflight import check_before_start
from orchestrator.recorder import Recorder
from orchestrator.requests import RequestDesk
from orchestrator.resume import Resume, parse_resume
from orchestrator.run_identity import find_run_id, open_run_record
from orchestrator.verifier_wiring import make_verifier
from orchestrator.worker_group import WorkerGroup
from storage.commit_log import CommitLog
from storage.errors import LeaseHeld, StorageError
from storage.keeper_actor import NAMESPACE
from storage.keys import new_nonce
from storage.lease import acquire
from storage.object_store import ObjectStore
from storage.open_store import open_store
from workers.lifeline import LifelineSpec
from workers.settings import SignalSettings, WorkerSettings
from workers.worker import create_worker

__all__ = ["TrainLoop", "run_driver"]

_log = logging.getLogger(__name__)
TrainLoop = Callable[[Any], None]


def run_driver(
    config: RunConfig,
    options: DriverOptions,
    *,
    train_loop: TrainLoop | None = None,
    loop_config: dict[str, Any] | None = None,
) -> ExitCode:
    """Drive the Run in ``config`` to its end on the cluster at hand; returns why it ended.

    ``train_loop`` None: the built-in recipe. Raises ConfigError before anything was started.
    """
    stop_requested = threading.Event()
    report_to = sys.stdout
    # Ray prints what workers and nodes say; stdout is the report's alone.
    with (
        contextlib.redirect_stdout(sys.stderr),
        _cluster(options),
        _stop_on_signals(stop_requested),  # after the cluster: ray.init puts a SIGTERM handler of its own in place
        contextlib.ExitStack() as at_end,
    ):
        nonce = new_nonce()
        owner = f"pid {os.getpid()} on {socket.gethostname()}"
        store = open_store(config.run.url, config.checkpoint.store)
        run_id = find_run_id(store, config)
        try:
            actor = claim_run(run_id, config, owner)
            # A connection that outlives this driver must not keep the Run claimed.
            at_end.callback(ray.kill, actor, no_restart=True)
            lease = acquire(store, run_id, nonce=nonce, ttl_s=LEASE_TTL_S)
            # For what comes again soon anyway, and for what must not hold up the end.
            one_try = open_store(config.run.url, config.checkpoint.store.model_copy(update={"retries": 0}))
            lease.renew_through(one_try)
        except LeaseHeld as error:
            _log.error("%s", error)
            return ExitCode.REFUSED
        except StorageError as error:
            raise cannot_start(config.run.url, f"run.url cannot be reached: {error}", error) from error
        with DriverLease(lease, LEASE_TTL_S / 5) as held:
            driver = _Driver(config, options, run_id, nonce, store, one_try, train_loop, loop_config or {}, report_to)
            return driver.drive(CoordinatorClient(actor), stop_requested, held.lost)


class _Driver:
    """One driver that holds the Run: sets everything up, runs the controller, takes everything down."""

    def __init__(
        self,
        config: RunConfig,
        options: DriverOptions,
        run_id: str,
        nonce: str,
        store: ObjectStore,
        one_try: ObjectStore,
        train_loop: TrainLoop | None,
        loop_config: dict[str, Any],
        report_to: TextIO,
    ) -> None:
        self._config = config
        self._options = options
        self._run_id = run_id
        self._nonce = nonce
        self._store = store
        self._one_try = one_try
        self._train_loop = train_loop
        self._loop_config = loop_config
        self._report_to = report_to

    def drive(self, coordinator: CoordinatorClient, stop: threading.Event, lease_lost: threading.Event) -> ExitCode:
        facts = check_before_start(self._store, self._config)
        journal = Journal(self._store, self._nonce, utc_now)
        journal.load()
        log = CommitLog(self._store, self._run_id)
        resume = parse_resume(self._config, log)
        identity = open_run_record(self._store, self._run_id)
        parts = (identity, self._config, self._options, self._report_to)
        with DriverRecord(self._store, self._one_try, *parts) as record:
            record.sink.emit("store_facts", **facts.as_json())
            ensure_dataset(self._config, record.note)
            first_number = 1 + max(
                [journal.last_attempt_number(), *(commit.attempt.number for commit in log.all_commits())]
            )
            newest = max((commit.step for commit in log.commits()), default=0)
            record.driver_started(nonce=self._nonce, first_attempt=first_number, durable_step=newest)
            steps = self._config.run.steps
            if self._config.run.resume == "auto" and has_whole_end(self._store, log, steps):
                reached = max(steps, newest)
                reason = f"step {reached} was committed before; raise run.steps, now {steps}, beyond that to train on"
                return record.finish(RunEnd(exit_code=ExitCode.SUCCESS, reason=reason))
            durable_step = None if self._config.checkpoint.memory.mode == "off" else newest
            try:
                end = self._control(coordinator, journal, record, resume, stop, lease_lost, first_number, durable_step)
            except ray.exceptions.RayError as error:
                # A signal to the whole process group stops Ray as well: then the stop was what was asked for.
                code = ExitCode.STOPPED if stop.is_set() else ExitCode.INTERNAL_ERROR
                _log.exception("the control plane broke")
                reason = f"the coordinator or the Ray head is gone ({type(error).__name__}); run the same command again"
                end = RunEnd(exit_code=code, reason=reason)
            return record.finish(end)

    def _control(
        self,
        coordinator: CoordinatorClient,
        journal: Journal,
        record: DriverRecord,
        resume: Resume,
        stop: threading.Event,
        lease_lost: threading.Event,
        first_number: int,
        durable_step: int | None,
    ) -> RunEnd:
        meeting_point = MeetingPoint()
        crew = KeeperCrew(self._run_id, self._config)
        group = WorkerGroup(
            run_id=self._run_id,
            spawn=self._spawn,
            start_keeper=crew.start,
            resources_per_worker=self._config.world.resources_per_worker,
            lifelines=Lifelines(ray.util.get_node_ip_address()),
        )
        watcher = NodeWatcher()
        desk = RequestDesk(self._one_try, self._nonce)
        recorder = Recorder(record.sink, start_unix_s=record.start_unix_s, newest_step=record.newest_step)
        verifier = make_verifier(
            self._settings(),
            self._config.run.url,
            recorder=recorder,
            coordinator=coordinator,
            has_own_loop=self._train_loop is not None,
            log_level=self._worker_log_level,
        )
        try:
            desk.start()
            verifier.start()
            controller = Controller(
                run_id=self._run_id,
                config=self._config,
                nonce=self._nonce,
                group=group,
                watcher=watcher,
                crew=crew,
                coordinator=coordinator,
                journal=journal,
                recorder=recorder,
                rendezvous=meeting_point.address,
                resume=resume,
                desk=desk,
                ask_cluster=self._ask_cluster,
                stop_requested=stop,
                lease_lost=lease_lost,
                first_attempt_number=first_number,
                durable_step=durable_step,
                trained_until_s=record.trained_until_s,
            )
            end = controller.run()
            if end.keeps_memory:
                crew.leave_behind()
            return end
        except Exception:
            crew.leave_behind()  # no verdict of this driver: the same command goes on from what memory holds
            raise
        finally:
            verifier.close()
            desk.close()
            request_resources(bundles=[])  # an autoscaler may let the nodes go
            watcher.close()
            group.close()
            crew.close()
            meeting_point.close()

    def _ask_cluster(self, num_workers: int) -> None:
        """Tell an autoscaler, where there is one, what is wanted."""
        request_resources(bundles=[self._config.world.resources_per_worker] * num_workers)

    @property
    def _worker_log_level(self) -> str:
        return "DEBUG" if self._config.log_level == "DEBUG" else "WARNING"  # Ray copies it to the driver

    def _settings(self) -> WorkerSettings:
        config = self._config
        return WorkerSettings(
            run_id=self._run_id,
            seed=config.seed,
            total_steps=config.run.steps,
            model=config.model,
            data=config.data,
            signals=SignalSettings(
                every_steps=config.policy.evaluate_every_steps,
                device_share=config.policy.pressure.device_share,
                host_share=config.policy.pressure.host_share,
            ),
            optim=config.optim,
            eval=config.eval,
            checkpoint=config.checkpoint,
            loop_config=self._loop_config,
            num_threads=config.world.threads_per_worker,
            must_be_finite=config.failure.nan != "ignore",
            loss_spike=config.failure.loss_spike,
            reproducible=config.reproducible,
            trace_every=config.run.trace_every,
        )

    def _spawn(
        self, *, worker_id: str, node_id: str, keeper: Any, options: dict[str, Any], lifeline: LifelineSpec
    ) -> Any:
        return create_worker(
            self._settings(),
            worker_id=worker_id,
            node_id=node_id,
            keeper=keeper,
            train_loop=self._train_loop,
            log_level=self._worker_log_level,
            options=options,
            lifeline=lifeline,
        )


@contextlib.contextmanager
def _cluster(options: DriverOptions) -> Iterator[None]:
    """Connect to the cluster that is named or found; else start one on this machine. Leaves it at the end.

    A process that is connected already, as a notebook is, stays so.
    """
    if ray.is_initialized():
        if hiding := hiding_files([os.getcwd()]):
            _log.warning("where Ray's workers look first they hide packages of Raysume: %s", ", ".join(hiding))
        yield
        return
    level = logging.getLogger().getEffectiveLevel()
    common: dict[str, Any] = {"namespace": NAMESPACE, "logging_level": max(level, logging.WARNING)}
    if environment := ray_environment():
        common["runtime_env"] = environment
    named = options.ray_address or os.environ.get("RAY_ADDRESS", "")
    if named in ("", "auto") and not finds_cluster():
        named = "local"
    try:
        if named == "local":
            raise ConnectionError("no cluster is named")
        ray.init(address=named or "auto", **common)
    except ConnectionError as error:
        if named not in ("", "auto", "local"):
            # One machine in place of the cluster that was meant would train for days before anyone noticed.
            raise ConfigError(named, (f"no Ray cluster answers there: {error}",)) from error
        _log.info("no Ray cluster found: starting one on this machine")
        ray.init(address="local", include_dashboard=False, **common)
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _stop_on_signals(stop_requested: threading.Event) -> Iterator[None]:
    """First SIGINT or SIGTERM: save, leave, end. A second one ends at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, _frame: object) -> None:
        if stop_requested.is_set():
            raise KeyboardInterrupt
        _log.warning("%s: saving and stopping; once more stops at once", signal.Signals(number).name)
        stop_requested.set()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
