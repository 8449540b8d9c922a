"""Drives both state machines over a bad network: loss, delay, duplication, reordering, replays, crashes, restarts.

One worker P computes prompts, two workers D and E take them and move them to each other, so there are four Links, two
of them between the same two workers. The harness plays the adapters: it carries out actions, lets copies take time,
and keeps the books that must balance. `pages` of a transfer are values by position; a frame carries a slice of them
and its checksum.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import xxhash
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_transfer.protocol.actions import (
    AbandonPages,
    Action,
    CommitPages,
    FailLink,
    Place,
    PostChunk,
    ReleasePages,
    ReportCommitted,
    ReportEnded,
    ReportFailed,
    ReportGranted,
    ReportReleased,
    ReservePages,
    Revoke,
    Send,
    SkipChunks,
    Supersede,
)
from kv_transfer.protocol.counters import Counters, Reason
from kv_transfer.protocol.fence import Fence
from kv_transfer.protocol.frames import Drop, PlacementEvent, PlacementTable, Wait, Write
from kv_transfer.protocol.messages import ChunkHeader, Message, Seal, TransferId, WireLayout, chain_digest
from kv_transfer.protocol.receiver import ReceiverLink
from kv_transfer.protocol.receiver_transfer import LinkTerms, ReceiverState
from kv_transfer.protocol.sender import SenderLink, SenderState
from kv_transfer.protocol.timing import Timeouts
from services.runtime.errors import NoFreePages, RequestCancelled, TandemError, TransferFailed, WorkerUnavailable
from tests.examples import examples

LAYOUT = WireLayout("f", 4, "float32", 1, 1, 1, True)
FRAME_PAGES = 2
TERMS = LinkTerms(LAYOUT, LAYOUT, slot_bytes=FRAME_PAGES * LAYOUT.page_bytes)
TIMEOUTS = Timeouts()
DEADLINE_S = 30.0
FRAME_FAULTS = ("lose", "repeat", "corrupt", "shorten", "swap", "replay")
FAULTS = (
    *(f"frame {how}" for how in FRAME_FAULTS),
    *(f"{way} {how}" for way in ("up", "down") for how in ("lose", "repeat", "delay")),
    *(f"abort {side}" for side in ("sender", "receiver")),
    *(
        "up alter",
        "up alter",
        "refuse",
        "break",
        "wait",
        "crash source",
        "crash target",
        "steal source",
        "steal target",
        "old",
    ),
)
# From which step on, what, and which one.
FAULT = st.tuples(st.integers(0, 30), st.sampled_from(FAULTS), st.integers(0, 41))
# Senders and receivers: prompts from P, running answers between D and E.
ROUTES = (("P", "D"), ("P", "E"), ("D", "E"), ("E", "D"))


def checksum(content: tuple[str, ...]) -> bytes:
    return xxhash.xxh3_128_digest("|".join(content).encode())


@dataclass
class Frame:
    seq: int
    content: tuple[str, ...]
    digest: bytes


@dataclass
class SenderBooks:
    """What the world knows of a transfer at the sender."""

    id: TransferId
    content: dict[int, str]
    granted: bool = False
    num_sent: int = 0
    sealed: bool = False
    committed: bool = False
    failed: bool = False
    num_releases: int = 0
    copying: int = 0
    stolen: set[int] = field(default_factory=set)
    gone: bool = False  # the worker died

    @property
    def num_pages(self) -> int:
        return len(self.content)

    def content_of(self, page: int) -> str:
        return f"somebody else's {page}" if page in self.stolen else self.content[page]


@dataclass
class ReceiverBooks:
    """What the world knows of a transfer at the receiver: its pages, by position in the prompt."""

    id: TransferId
    num_pages: int
    pages: dict[int, str] = field(default_factory=dict)
    held: bool = False
    writing: bool = False
    committed: bool = False
    abandoned: bool = False
    num_releases: int = 0
    stolen: set[int] = field(default_factory=set)
    gone: bool = False  # the worker died


class World:
    """Both ends of one Link and the network between them. A break or a crash makes a new World on the same books."""

    def __init__(
        self,
        route: tuple[str, str],
        now: float,
        fence: Fence,
        counters: Counters,
        sent: dict[TransferId, SenderBooks],
        received: dict[TransferId, ReceiverBooks],
    ) -> None:
        self.route = route
        self.now = now
        self.sender = SenderLink(
            layout=LAYOUT, frame_pages=FRAME_PAGES, timeouts=TIMEOUTS, counters=Counters(), now=now
        )
        self.receiver = ReceiverLink(terms=TERMS, fence=fence, timeouts=TIMEOUTS, counters=counters, now=now)
        self.table = PlacementTable(frame_pages=FRAME_PAGES, page_bytes=LAYOUT.page_bytes)
        self.up: list[Message] = []
        self.down: list[Message] = []
        self.posts: list[PostChunk] = []
        self.skipped: set[TransferId] = set()
        self.post_offset = 0
        self.post_digests: list[bytes] = []
        self.frames: list[Frame] = []
        self.busy: tuple[Frame, Write] | None = None
        self.told: list[PlacementEvent] = []  # by the placing thread, not yet heard by the machine
        self.works: list[Action] = []
        self.sent = sent
        self.received = received
        self.heard: list[Message] = []
        self.sealed: dict[TransferId, Seal] = {}
        self.is_sender_dead = False
        self.is_receiver_dead = False

    # --- carrying out actions ---

    def at_sender(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send():
                    if self.sender.lost is None:
                        self.up.append(action.message)
                    if isinstance(action.message, Seal):
                        self.sealed[action.message.id] = action.message
                case PostChunk():
                    self.posts.append(action)
                case SkipChunks():
                    self.skipped.add(action.id)
                case ReportGranted():
                    self.sent[action.id].granted = True
                case ReportCommitted():
                    books = self.sent[action.id]
                    assert not books.failed
                    assert self.received[action.id].committed, "the sender was told of a commit that never was"
                    books.committed = True
                case ReportFailed():
                    assert not self.sent[action.id].committed
                    self.sent[action.id].failed = True
                case ReportReleased():
                    books = self.sent[action.id]
                    books.num_releases += 1
                    assert books.num_releases == 1
                    assert books.copying == 0, "released while a copy may still read the pages"
                case FailLink():
                    self.break_sender(action.error)
                case _:
                    raise AssertionError(action)

    def at_receiver(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send():
                    if self.receiver.lost is None:
                        self.down.append(action.message)
                case ReservePages() | CommitPages() | ReleasePages():
                    if isinstance(action, ReleasePages):
                        books = self.received[action.id]
                        books.num_releases += 1
                        assert books.held, "released twice"
                        assert books.num_releases == 1, "released twice"
                        assert not books.committed, "released after a commit"
                        assert not books.writing, "released while a copy may still write to the pages"
                    if isinstance(action, CommitPages):
                        self.check_commit(action.id)
                        assert (action.first_token_id, action.sampling_position) == (1, 2), "an altered seal"
                    self.works.append(action)
                case AbandonPages():
                    assert self.received[action.id].committed, "a commit that never was is given up"
                    self.received[action.id].abandoned = True
                case Place():
                    self.on_events(self.table.add(action))
                case Revoke():
                    self.on_events(self.table.revoke(action.id))
                case Supersede():
                    self.at_receiver(self.receiver.abort(action.id, TransferFailed("superseded")))
                case ReportEnded():
                    assert not self.received[action.id].held or self.received[action.id].committed
                case FailLink():
                    self.break_receiver(action.error)
                case _:
                    raise AssertionError(action)

    def check_commit(self, transfer_id: TransferId) -> None:
        books = self.received[transfer_id]
        source = self.sent[transfer_id]
        assert books.held
        assert not books.writing
        assert not books.committed
        assert books.pages == source.content
        believed = [each._seal for each in self.receiver.transfers if each.id == transfer_id]
        assert believed == [self.sealed[transfer_id]], "a commit of another seal than was sent"

    def on_events(self, events: list[PlacementEvent]) -> None:
        for event in events:
            self.at_receiver(self.receiver.placement(event))

    def break_sender(self, error: TandemError) -> None:
        self.at_sender(self.sender.link_lost(error))

    def break_receiver(self, error: TandemError) -> None:
        self.at_receiver(self.receiver.link_lost(error))
        if self.busy is None:
            self.on_events(self.table.close())

    def kill(self, worker: str) -> None:
        """The process is gone with all that it had. What it had written to the network may still arrive."""
        error = WorkerUnavailable("dead")
        if worker == self.route[0]:
            self.is_sender_dead, self.sender.lost = True, error
            self.posts.clear()
            self.sender._transfers.clear()
        else:
            self.is_receiver_dead, self.receiver.lost = True, error
            self.busy = None
            self.told.clear()
            self.works.clear()
            self.frames.clear()
            self.receiver._transfers.clear()
            self.table.close()

    def hear(self, message: Message) -> None:
        if self.receiver.lost is None:
            self.heard.append(message)
            self.at_receiver(self.receiver.on_message(message, self.now))

    # --- the sender's posting thread ---

    def post_step(self) -> None:
        """Begins, continues or ends a chunk."""
        chunk = self.posts[0]
        books = self.sent[chunk.id]
        if self.sender.lost is not None or chunk.id in self.skipped:
            if self.sender.lost is None:
                last_seq = chunk.first_seq + (len(chunk.page_ids) - 1) // FRAME_PAGES
                self.frames.append(Frame(last_seq, (), bytes(16)))
            self._end_post(chunk)
            self.at_sender(self.sender.chunk_skipped(chunk.id))
        elif self.post_offset < len(chunk.page_ids):
            books.copying = 1
            offsets = range(self.post_offset, min(self.post_offset + FRAME_PAGES, len(chunk.page_ids)))
            pages = [chunk.first_page + offset for offset in offsets]
            content = tuple(books.content_of(page) for page in pages)
            if books.stolen.intersection(pages):
                # The generations of the pages are not those of when they were sent.
                last_seq = chunk.first_seq + (len(chunk.page_ids) - 1) // FRAME_PAGES
                self.frames.append(Frame(last_seq, (), bytes(16)))
                self._end_post(chunk)
                self.at_sender(self.sender.chunk_stale(chunk.id, self.now))
                return
            seq = chunk.first_seq + self.post_offset // FRAME_PAGES
            self.frames.append(Frame(seq, content, checksum(content)))
            self.post_digests.append(checksum(content))
            self.post_offset += FRAME_PAGES
        else:
            digest = chain_digest(self.post_digests)
            self._end_post(chunk)
            self.at_sender(self.sender.chunk_posted(chunk.id, chunk.chunk_index, digest, self.now))

    def _end_post(self, chunk: PostChunk) -> None:
        self.posts.pop(0)
        self.post_offset, self.post_digests = 0, []
        self.sent[chunk.id].copying = 0

    # --- the receiver's placing thread ---

    def tell_step(self) -> None:
        """The machine hears what the thread said next."""
        self.on_events([self.told.pop(0)])

    def place_step(self) -> None:
        """Begin to copy a frame, or end the copy that runs."""
        if self.busy is not None:
            self._end_copy(*self.busy)
        elif self.frames and self.receiver.lost is None:
            frame = self.frames[0]
            verdict, events = self.table.begin(frame.seq, len(frame.content) * LAYOUT.page_bytes)
            self.told.extend(events)
            match verdict:
                case Write():
                    self.frames.pop(0)
                    pages = range(verdict.first_page, verdict.first_page + verdict.num_pages)
                    if self.received[verdict.id].stolen.intersection(pages):
                        self.told.extend(self.table.finish(frame.seq, None, Reason.STALE_GENERATION))
                        return
                    self.busy = (frame, verdict)
                    self.received[verdict.id].writing = True
                case Drop():
                    self.frames.pop(0)
                case Wait():
                    pass

    def _end_copy(self, frame: Frame, write: Write) -> None:
        self.busy = None
        books = self.received[write.id]
        is_right = checksum(frame.content) == frame.digest
        if is_right:
            assert books.held, "written to pages that are no longer the transfer's"
            assert not books.committed, "written to pages that are no longer the transfer's"
            assert write.first_page + len(frame.content) <= books.num_pages, "written outside the reservation"
            for offset, content in enumerate(frame.content):
                books.pages[write.first_page + offset] = content
        books.writing = False
        self.told.extend(self.table.finish(frame.seq, frame.digest if is_right else None))
        if self.receiver.lost is not None:
            self.told.extend(self.table.close())

    # --- the receiving worker ---

    def work_step(self, index: int, *, refuse: bool) -> None:
        work = self.works.pop(index % len(self.works))
        if isinstance(work, ReservePages) and self.received[work.id].gone:
            # An old message asks this life of the worker for what died with an earlier one.
            self.received[work.id] = ReceiverBooks(work.id, self.received[work.id].num_pages)
        match work:
            case ReservePages() if refuse:
                self.at_receiver(self.receiver.reserve_failed(work.id, NoFreePages("full")))
            case ReservePages():
                books = self.received[work.id]
                assert not books.held, "pages were set aside twice"
                books.held = True
                self.at_receiver(self.receiver.reserved(work.id, books.num_pages, 0))
            case CommitPages() if refuse or self.received[work.id].stolen:
                self.at_receiver(self.receiver.commit_failed(work.id, TransferFailed("refused")))
            case CommitPages():
                self.check_commit(work.id)
                books = self.received[work.id]
                assert not books.committed
                assert books.pages == self.sent[work.id].content
                books.committed = True
                self.at_receiver(self.receiver.committed(work.id))
            case ReleasePages():
                self.received[work.id].held = False
                self.at_receiver(self.receiver.released(work.id))


class Handoffs(RuleBasedStateMachine):
    """Any interleaving of what users, network, threads, workers and the clock may do."""

    reliable = False

    @initialize()
    def begin(self) -> None:
        self.now = 100.0
        self.counters = Counters()
        self.fences = {"D": Fence(), "E": Fence()}
        self.sent: dict[TransferId, SenderBooks] = {}
        self.received: dict[TransferId, ReceiverBooks] = {}
        self.routes: dict[TransferId, tuple[str, str]] = {}
        self.last_attempt: dict[str, int] = {}
        self.is_whole = True  # nothing was lost on a Link, and no Link was
        self.old_worlds: list[World] = []
        self.worlds = {route: self.new_world(route) for route in ROUTES}
        self.world = self.worlds[ROUTES[0]]

    def new_world(self, route: tuple[str, str]) -> World:
        return World(route, self.now, self.fences[route[1]], self.counters, self.sent, self.received)

    @rule(route=st.sampled_from(ROUTES))
    def turn_to(self, route: tuple[str, str]) -> None:
        """What comes next happens on this Link; the others stand still until the clock or their turn comes."""
        self.world = self.worlds[route]

    # --- users ---

    @rule(num_pages=st.integers(1, 7), how=st.sampled_from(["new", "retry", "again"]))
    def reserve_only(self, num_pages: int, how: str) -> None:
        self.reserve(num_pages, how)

    def reserve(self, num_pages: int, how: str) -> SenderBooks | None:
        """Begin a transfer on the present Link.

        P sends a new prompt, computes one again for a later attempt (`retry`), or sends pages that it kept of an older
        attempt (`again`). D and E move an answer whose pages they took.
        """
        world = self.world
        if world.sender.lost is not None or len(world.sender.transfers) > 3:
            return None
        request_id, content = str(len(self.last_attempt) + 1), None
        if world.route[0] != "P":
            movable = self._movable(world.route[0])
            if movable is None:
                return None
            request_id, content = movable.id.request_id, dict(movable.pages)
        elif how != "new" and self.last_attempt and not self.reliable:
            request_id = str(len(self.last_attempt))
            older = self.sent[TransferId(request_id, self.last_attempt[request_id])]
            if how == "again" and older.num_releases and not older.stolen and self.routes[older.id][0] == "P":
                content = dict(older.content)
        attempt = self.last_attempt.get(request_id, 0) + 1
        self.last_attempt[request_id] = attempt
        transfer_id = TransferId(request_id, attempt)
        if content is None:
            content = {page: f"{transfer_id}/{page}" for page in range(num_pages)}
        self.sent[transfer_id] = SenderBooks(transfer_id, content)
        self.received[transfer_id] = ReceiverBooks(transfer_id, len(content))
        self.routes[transfer_id] = world.route
        num_tokens = len(content) * LAYOUT.page_size - 1
        deadline = self.now + DEADLINE_S
        world.at_sender(world.sender.reserve(transfer_id, num_tokens, deadline=deadline, now=self.now))
        return self.sent[transfer_id]

    def _movable(self, worker: str) -> ReceiverBooks | None:
        """An answer that runs at this worker."""
        for transfer_id, books in self.received.items():
            is_newest = self.last_attempt[transfer_id.request_id] == transfer_id.attempt
            if is_newest and books.committed and not books.gone and self.routes[transfer_id][1] == worker:
                return books
        return None

    def _streaming(self) -> list[SenderBooks]:
        return [self.sent[each.id] for each in self.world.sender.transfers if each.state is SenderState.STREAMING]

    @precondition(lambda self: self._streaming())
    @rule(which=st.integers(0, 9), count=st.integers(1, 5))
    def send(self, which: int, count: int) -> None:
        streaming = self._streaming()
        books = streaming[which % len(streaming)]
        self._send(books, min(count, books.num_pages - books.num_sent))

    def _send(self, books: SenderBooks, count: int) -> None:
        if count:
            pages = range(books.num_sent, books.num_sent + count)
            self.world.at_sender(self.world.sender.send(books.id, books.num_sent, list(pages)))
            books.num_sent += count

    @precondition(lambda self: self._streaming())
    @rule(which=st.integers(0, 9))
    def send_rest_and_seal(self, which: int) -> None:
        streaming = self._streaming()
        books = streaming[which % len(streaming)]
        self._send(books, books.num_pages - books.num_sent)
        self._seal(books)

    def _seal(self, books: SenderBooks) -> None:
        num_tokens = books.num_pages * LAYOUT.page_size - 1
        self.world.at_sender(
            self.world.sender.seal(books.id, num_tokens=num_tokens, first_token_id=1, sampling_position=2, now=self.now)
        )
        books.sealed = True

    @precondition(lambda self: not self.reliable and self.world.sender.transfers)
    @rule(which=st.integers(0, 9))
    def abort_at_sender(self, which: int) -> None:
        transfers = self.world.sender.transfers
        transfer = transfers[which % len(transfers)]
        self.world.at_sender(self.world.sender.abort(transfer.id, RequestCancelled("cancel"), self.now))

    @precondition(lambda self: not self.reliable and self.world.receiver.transfers)
    @rule(which=st.integers(0, 9))
    def abort_at_receiver(self, which: int) -> None:
        transfers = self.world.receiver.transfers
        transfer = transfers[which % len(transfers)]
        self.world.at_receiver(self.world.receiver.abort(transfer.id, RequestCancelled("cancel")))

    @rule(
        num_pages=st.integers(1, 7),
        faults=st.lists(FAULT, max_size=2),
        num_steps=st.integers(10, 60),
        how=st.sampled_from(["new", "retry", "again"]),
        route=st.sampled_from(ROUTES),
    )
    def whole_transfer(
        self, num_pages: int, faults: list[tuple[int, str, int]], num_steps: int, how: str, route: tuple[str, str]
    ) -> None:
        """A transfer from its reservation on in good order, but for a few faults at chosen steps."""
        self.world = self.worlds[route]
        self._whole_transfer(num_pages, how, faults, num_steps)

    @rule(
        num_pages=st.integers(1, 7),
        hops=st.lists(st.lists(FAULT, max_size=1), min_size=2, max_size=4),
        to_e=st.booleans(),
    )
    def journey(self, num_pages: int, hops: list[list[tuple[int, str, int]]], to_e: bool) -> None:
        """A prompt is computed, handed over, and the answer is moved to and fro between D and E."""
        route = ROUTES[to_e]
        for faults in hops:
            self.world = self.worlds[route]
            self._whole_transfer(num_pages, "new", faults, 80)
            route = (route[1], "E" if route[1] == "D" else "D")

    def _whole_transfer(self, num_pages: int, how: str, faults: list[tuple[int, str, int]], num_steps: int) -> None:
        books = self.reserve(num_pages, how)
        if books is None:
            return
        pending = [] if self.reliable else list(faults)
        for step in range(num_steps):
            # A fault waits from its step on for something that it can harm.
            pending = [fault for fault in pending if fault[0] > step or not self._inject(*fault[1:])]
            if books in self._streaming() and step % 3 == 0:
                count = min(3, books.num_pages - books.num_sent)
                self._send(books, count)
                if books.num_sent == books.num_pages:
                    self._seal(books)
            self._step(self.world)

    def _inject(self, fault: str, which: int) -> bool:
        world = self.world
        kind, _, how = fault.partition(" ")
        match kind:
            case "frame" if world.frames:
                self.harm_frames(which, how)
            case "up" if how == "alter":
                return self._alter(which)
            case "up" if world.up:
                self._harm_messages(world.up, which, how)
            case "down" if world.down:
                self._harm_messages(world.down, which, how)
            case "crash":
                self._crash(world.route[how == "target"], is_noticed=bool(which % 2))
            case "steal":
                return self._steal(which, at_sender=how == "source")
            case "old":
                self._replay(which)
            case "abort" if how == "sender" and world.sender.transfers:
                self.abort_at_sender(which)
            case "abort" if how == "receiver" and world.receiver.transfers:
                self.abort_at_receiver(which)
            case "refuse" if world.works:
                world.work_step(which, refuse=True)
            case "break":
                self._break_link(sender_first=bool(which % 2))
            case "wait":
                self._pass_time(1.0)
            case _:
                return False
        return True

    # --- network ---

    @precondition(lambda self: self.world.up or self.world.down)
    @rule(data=st.data(), up=st.booleans(), keep=st.booleans())
    def deliver(self, data: st.DataObject, up: bool, keep: bool) -> None:
        queue = self.world.up if (up and self.world.up) or not self.world.down else self.world.down
        index = 0 if self.reliable else data.draw(st.integers(0, min(3, len(queue) - 1)))
        message = queue[index] if keep and not self.reliable else queue.pop(index)
        self._deliver(message, is_up=queue is self.world.up)

    def _deliver(self, message: Message, *, is_up: bool) -> None:
        if is_up:
            self.world.hear(message)
        elif not is_up and self.world.sender.lost is None:
            self.world.at_sender(self.world.sender.on_message(message, self.now))

    @precondition(lambda self: not self.reliable and (self.world.up or self.world.down))
    @rule(up=st.booleans(), which=st.integers(0, 9))
    def lose(self, up: bool, which: int) -> None:
        queue = self.world.up if (up and self.world.up) or not self.world.down else self.world.down
        self._harm_messages(queue, which, "lose")

    def _harm_messages(self, queue: list[Message], which: int, how: str) -> None:
        index = which % len(queue)
        match how:
            case "lose":
                queue.pop(index)
                self.is_whole = False
            case "repeat":
                queue.append(queue[index])
            case "delay":
                queue.append(queue.pop(index))

    def _alter(self, which: int) -> bool:
        """A header or seal is not what the sender meant to say."""
        queue = self.world.up
        found = [index for index, message in enumerate(queue) if isinstance(message, ChunkHeader | Seal)]
        if found:
            index = found[which % len(found)]
            queue[index] = _altered(queue[index], which)
            self.is_whole = False
        return bool(found)

    @precondition(lambda self: not self.reliable)
    @rule(which=st.integers(0, 30))
    def replay(self, which: int) -> None:
        self._replay(which)

    def _replay(self, which: int) -> None:
        """The receiver, perhaps in its next life, hears once more what it was told once, perhaps on an older Link."""
        heard = [
            message
            for world in (*self.old_worlds, self.world)
            if world.route == self.world.route
            for message in world.heard
        ]
        if heard:
            self.world.hear(heard[which % len(heard)])
            self.is_whole = False  # a header of old takes numbers from one to come

    @precondition(lambda self: not self.reliable)
    @rule(which=st.integers(0, 30), at_sender=st.booleans())
    def steal(self, which: int, at_sender: bool) -> None:
        self._steal(which, at_sender=at_sender)

    def _steal(self, which: int, *, at_sender: bool) -> bool:
        """A worker's books are wrong: a page that a transfer holds is given to somebody else."""
        if at_sender:
            transfers = [self.sent[each.id] for each in self.world.sender.transfers]
            posted = [books for books in transfers if books.num_sent and not books.num_releases]
            if posted:
                posted[which % len(posted)].stolen.add(which % posted[which % len(posted)].num_sent)
            return bool(posted)
        # A copy that is under way cannot be told from outside, so it is left alone.
        held = [self.received[each.id] for each in self.world.receiver.transfers if self.received[each.id].held]
        idle = [books for books in held if not books.writing and not books.committed]
        if idle:
            idle[which % len(idle)].stolen.add(which % idle[which % len(idle)].num_pages)
        return bool(idle)

    @precondition(lambda self: not self.reliable and self.world.frames)
    @rule(which=st.integers(0, 3), how=st.sampled_from(FRAME_FAULTS))
    def harm_frames(self, which: int, how: str) -> None:
        frames = self.world.frames
        index = which % len(frames)
        frame = frames[index]
        match how:
            case "lose":
                frames.pop(index)
            case "repeat":
                frames.insert(index, Frame(frame.seq, frame.content, frame.digest))
            case "corrupt":
                frames[index] = Frame(frame.seq, ("garbage", *frame.content[1:]), frame.digest)
            case "shorten":
                frames[index] = Frame(frame.seq, frame.content[:-1], checksum(frame.content[:-1]))
            case "swap":
                frames.append(frames.pop(index))
            case "replay":
                # A frame of right form with the wrong content: only the seal can tell.
                other = tuple(f"old{content}" for content in frame.content)
                frames[index] = Frame(frame.seq, other, checksum(other))

    @rule(num_steps=st.integers(1, 25))
    def run_well(self, num_steps: int) -> None:
        """For a while everything goes its way, so that later phases are reached too."""
        for _ in range(num_steps):
            self._step(self.world)

    # --- threads, workers, clock ---

    @precondition(lambda self: self.world.posts)
    @rule()
    def post(self) -> None:
        self.world.post_step()

    @precondition(lambda self: self.world.frames or self.world.busy)
    @rule()
    def place(self) -> None:
        self.world.place_step()

    @precondition(lambda self: self.world.told)
    @rule()
    def tell(self) -> None:
        self.world.tell_step()

    @precondition(lambda self: self.world.works)
    @rule(which=st.integers(0, 9), refuse=st.sampled_from([False, False, False, True]))
    def work(self, which: int, refuse: bool) -> None:
        self.world.work_step(which, refuse=refuse and not self.reliable)

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0]))
    def pass_time(self, seconds: float) -> None:
        self._pass_time(seconds)

    def _pass_time(self, seconds: float) -> None:
        if self.reliable:
            self._drain()
        self.now += seconds
        for world in self._all_worlds():
            world.now = self.now
            world.at_sender(world.sender.tick(self.now))
            world.at_receiver(world.receiver.tick(self.now, world.table.num_frames_seen))

    def _all_worlds(self) -> tuple[World, ...]:
        return (*self.old_worlds, *self.worlds.values())

    @precondition(lambda self: not self.reliable)
    @rule(sender_first=st.booleans(), chance=st.integers(0, 9))
    def break_link(self, sender_first: bool, chance: int) -> None:
        if chance == 7:
            self._break_link(sender_first=sender_first)

    def _break_link(self, *, sender_first: bool) -> None:
        """The stream breaks; both sides notice, and a new Link is made on which old ones' ends still settle."""
        error = WorkerUnavailable("broken")
        breaks = [self.world.break_sender, self.world.break_receiver]
        for each in breaks if sender_first else reversed(breaks):
            each(error)
        self._renew(self.world.route)
        self.world = self.worlds[self.world.route]

    @precondition(lambda self: not self.reliable)
    @rule(worker=st.sampled_from("PDE"), is_noticed=st.booleans(), chance=st.integers(0, 9))
    def crash(self, worker: str, is_noticed: bool, chance: int) -> None:
        if chance == 7:
            self._crash(worker, is_noticed=is_noticed)

    def _crash(self, worker: str, *, is_noticed: bool) -> None:
        """A worker dies and another life begins. The others notice at once, or by its silence."""
        error = WorkerUnavailable("dead")
        if worker in self.fences:
            self.fences[worker] = Fence()
        for transfer_id, (source, target) in self.routes.items():
            self.sent[transfer_id].gone |= source == worker
            self.received[transfer_id].gone |= target == worker
        for world in self.old_worlds:
            if worker in world.route:
                world.kill(worker)
        for route in ROUTES:
            world = self.worlds[route]
            if worker in route:
                world.kill(worker)
                if is_noticed and worker == route[0]:
                    world.break_receiver(error)
                elif is_noticed:
                    world.break_sender(error)
                self._renew(route)
        self.world = self.worlds[self.world.route]

    def _renew(self, route: tuple[str, str]) -> None:
        self.is_whole = False
        self.old_worlds.append(self.worlds[route])
        self.worlds[route] = self.new_world(route)

    # --- what always holds ---

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "sent"):
            return
        for taken in self.received.values():
            assert not (taken.committed and taken.num_releases)
        for books in self.sent.values():
            assert not (books.committed and books.failed)

    def teardown(self) -> None:
        """However it went: once faults stop and the clocks run on, nothing is held and nobody waits."""
        if not hasattr(self, "sent"):
            return
        self._drain()
        for _ in range(int(DEADLINE_S) * 2 + 20):
            self._pass_time(0.5)
            self._drain()
        for world in self._all_worlds():
            assert not world.sender.transfers
            assert not world.receiver.transfers
            assert not world.posts
            assert world.busy is None
        for transfer_id, books in self.sent.items():
            if not books.gone:
                assert books.num_releases == 1, f"the sender's pages of {transfer_id} were never released"
                assert books.committed or books.failed
        for taken in self.received.values():
            assert taken.gone or taken.committed or not taken.held, f"the receiver's pages of {taken.id} leaked"
        if self.is_whole:
            self._check_that_failures_agree()

    def _check_that_failures_agree(self) -> None:
        """What has failed for the sender does not continue at the receiver, unless a newer attempt ended it there."""
        for transfer_id, books in self.sent.items():
            newer = [each for each in self.sent if each.request_id == transfer_id.request_id]
            is_newest = transfer_id.attempt == max(each.attempt for each in newer)
            if books.failed and is_newest:
                received = self.received[transfer_id]
                assert not received.committed or received.abandoned, f"{transfer_id} continues for nobody"

    def _drain(self) -> None:
        for world in self._all_worlds():
            while self._step(world):
                pass

    def _step(self, world: World) -> bool:
        """Do one thing that waits to be done, in good order; False if nothing does."""
        if world.up:
            world.hear(world.up.pop(0))
        elif world.down:
            message = world.down.pop(0)
            if world.sender.lost is None:
                world.at_sender(world.sender.on_message(message, self.now))
        elif world.told:
            world.tell_step()
        elif world.works:
            world.work_step(0, refuse=False)
        elif world.posts:
            world.post_step()
        elif world.busy or self._can_place(world):
            world.place_step()
        else:
            return False
        return True

    @staticmethod
    def _can_place(world: World) -> bool:
        if not world.frames or world.receiver.lost is not None:
            return False
        # A frame that nothing claims stays where it is until the stall limit breaks the channel.
        return not isinstance(_peek(world), Wait)


def _altered(message: Message, which: int) -> Message:
    """What a sender with an error might have said."""
    match message:
        case ChunkHeader(first_page=first_page, num_pages=num_pages, num_bytes=num_bytes):
            headers = (
                dataclasses.replace(message, first_page=first_page + 1),
                dataclasses.replace(message, first_page=max(0, first_page - 1)),
                dataclasses.replace(message, num_pages=num_pages + 1, num_bytes=num_bytes + LAYOUT.page_bytes),
                dataclasses.replace(message, num_bytes=num_bytes - 1),
                dataclasses.replace(message, chunk_index=message.chunk_index + 1),
                dataclasses.replace(message, chunk_index=max(0, message.chunk_index - 1)),
                dataclasses.replace(message, channel_seq=max(0, message.channel_seq - 1)),
            )
            return headers[which % len(headers)]
        case Seal():
            seals = (
                dataclasses.replace(message, num_tokens=message.num_tokens - 1),
                dataclasses.replace(message, num_pages=message.num_pages + 1),
                dataclasses.replace(message, num_bytes=message.num_bytes - 1),
                dataclasses.replace(message, num_chunks=max(0, message.num_chunks - 1)),
                dataclasses.replace(message, num_chunks=message.num_chunks + 1),
                dataclasses.replace(message, digest=bytes(16)),
                dataclasses.replace(message, first_token_id=message.first_token_id + 1),
                dataclasses.replace(message, sampling_position=message.sampling_position + 1),
            )
            return seals[which % len(seals)]
        case _:
            return message


def _peek(world: World) -> object:
    ticket_seqs = [
        ticket.end_seq for ticket in world.table._tickets if ticket.first_seq <= world.frames[0].seq < ticket.end_seq
    ]
    is_old = world.frames[0].seq <= world.table._last_seq
    return None if ticket_seqs or is_old else Wait()


class ReliableHandoffs(Handoffs):
    """On a network that does its work and with nobody giving up, every sealed transfer is committed."""

    reliable = True

    def teardown(self) -> None:
        super().teardown()
        assert all(books.committed for books in self.sent.values() if books.sealed)


_settings = settings(
    max_examples=examples(300),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
TestHandoffs = Handoffs.TestCase
TestHandoffs.settings = _settings
TestReliableHandoffs = ReliableHandoffs.TestCase
TestReliableHandoffs.settings = settings(_settings, max_examples=examples(100))


def test_states_are_named_sets() -> None:
    """A state added later must be thought about wherever ended states are listed."""
    assert {state.name for state in SenderState} == {
        "RESERVING",
        "STREAMING",
        "SEALING",
        "SEALED",
        "COMMITTED",
        "FAILED",
    }
    assert {state.name for state in ReceiverState} == {"RESERVING", "STREAMING", "COMMITTING", "COMMITTED", "FAILED"}
