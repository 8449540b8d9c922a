"""Every key and channel in Redis, with what is in it. Knows no connection.

All of it is a hint that may vanish or be wrong at any moment; serving continues without any of it. The braces
are literal: they put one cluster's keys into one slot, so that a script may touch several of them.
"""

import re
from dataclasses import dataclass

from services.runtime.errors import ConfigError

CLUSTER_NAME_PATTERN = r"[A-Za-z0-9_.-]{1,64}"


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one cluster. Several clusters may share a Redis. Raises ConfigError for a name outside the rule."""

    cluster: str

    def __post_init__(self) -> None:
        if re.fullmatch(CLUSTER_NAME_PATTERN, self.cluster) is None:
            raise ConfigError(f"the cluster's name is {self.cluster!r:.100} but must match {CLUSTER_NAME_PATTERN}")

    @property
    def prefix(self) -> str:
        """Start of every key."""
        return f"tandem:{{{self.cluster}}}:"

    @property
    def workers(self) -> tuple[str, str, str]:
        """Change log of the workers' records; see `_log`."""
        return self._log("workers")

    def _log(self, name: str) -> tuple[str, str, str]:
        """Three sorted sets of worker ids without TTL (see `change_log`).

        leases   the score is when the worker's lease ends, in unix ms by the clock of Redis
        changes  the same ids; the score is the number of the worker's last change
        gone     the last 1024 ids that left; the score is the number of that change
        """
        start = f"{self.prefix}{name}."
        return start + "leases", start + "changes", start + "gone"

    @property
    def workers_changed(self) -> str:
        """Channel: a message of any content means that a worker came, left or changed its state."""
        return self.prefix + "workers:changed"

    @property
    def epoch(self) -> str:
        """String, 32 hex digits, made by the first reader. Another value means that Redis has lost its memory."""
        return self.prefix + "epoch"

    @property
    def worker_prefix(self) -> str:
        """Start of the keys of worker records."""
        return self.prefix + "worker:"

    def worker(self, worker_id: str) -> str:
        """Hash of one worker, expires 3 s after its last renewal.

        order   20 digits of its start (unix ns), ':', its incarnation; the greater one is the newer life
        state   starting, ready or draining
        version digest of the record without its counts; another one is a change
        record  WorkerRecord as JSON, at most 16 KiB
        proof   HMAC-SHA256 of the record with each secret of its worker, in hexadecimal
        """
        return self.worker_prefix + worker_id

    @property
    def secret(self) -> str:
        """String, 64 hex digits: what processes without a configured secret prove to each other. Without TTL."""
        return self.prefix + "secret"

    @property
    def quarantine(self) -> str:
        """Sorted set of fingerprints of requests that killed their workers, 64 hex digits each; at most 1024.

        The score is when it ends, in unix ms by the clock of Redis; the set expires 10 min after a gateway's last look
        at it.
        """
        return self.prefix + "quarantine"

    @property
    def pages(self) -> tuple[str, str, str]:
        """Change log of the workers that have published pages; see `_log`."""
        return self._log("pages")

    @property
    def pages_prefix(self) -> str:
        """Start of the keys of published pages."""
        return self.prefix + "pages:"

    def pages_head(self, worker_id: str) -> str:
        """Hash: what a worker has published, and the last changes of it; expires 5 s after its last beat.

        order    as in the worker's record: the greater one is the newer life
        filling  decimal: the set below is being filled and will then be of that number; absent: it is not
        base     decimal: number of the last full publication
        seq      decimal: number of the last change that is in the set; within one `order` it stands for one content
        N        one of the last 64 changes by its number: how many keys were added (4 bytes, big-endian), those keys,
                 then the evicted ones, 16 bytes each; at most 2048 keys
        """
        return self.pages_prefix + worker_id

    @property
    def pages_asked(self) -> str:
        """Start of sets of page keys that are asked for; they last as long as the script that asks."""
        return self.prefix + "pages.asked:"

    def page_keys(self, worker_id: str) -> str:
        """Set of the keys of a worker's cached pages, 16 bytes each; expires with its head."""
        return self.pages_prefix + worker_id + ":keys"

    @property
    def autoscaler(self) -> str:
        """String: the name of the autoscaler that acts, at most 64 characters; expires 15 s after its last renewal."""
        return self.prefix + "autoscaler"

    @property
    def decisions(self) -> str:
        """String: the autoscaler's last 10 decisions as JSON, latest first; expires a day after the last one."""
        return self.prefix + "decisions"

    @property
    def gateways(self) -> str:
        """Sorted set of the incarnations of all running gateways; the score is when one counts as lost.

        The score is in unix ms by the clock of Redis, 10 s after its last sign of life.
        """
        return self.prefix + "gateways"

    @property
    def limit_prefix(self) -> str:
        """Start of the keys of tenants' limits; the tenant's name follows. A hash that expires once both are full.

        requests     what is left of requests per minute, a decimal number; negative: owed
        requests_at  unix time in us, by the clock of Redis, at which that was so
        tokens       the same for tokens per minute
        tokens_at    the same
        """
        return self.prefix + "limit:"

    @property
    def hold_prefix(self) -> str:
        """Start of the keys of tenants' running requests; the tenant's name follows. A sorted set of their names.

        The score is when one counts as ended, in unix ms by the clock of Redis: 10 s after its gateway's last renewal.
        """
        return self.prefix + "holds:"

    @property
    def request_prefix(self) -> str:
        """Start of the keys of placements."""
        return self.prefix + "request:"

    def request(self, request_id: str) -> str:
        """Hash of one request's placement, expires 1 h after its last change and 60 s after its end.

        state    one of placement.State
        began    when the request began, 20 digits (unix ns); with `attempt` the fence of writes
        attempt  decimal, from 1
        gateway  incarnation of the gateway that owns the request
        prefill  worker id, or empty
        decode   worker id, or empty
        changed  unix time of the last change in ms, by the clock of Redis
        """
        return self.request_prefix + request_id

    @property
    def journal_prefix(self) -> str:
        """Start of the keys of journals, which let another gateway continue a request that its client named.

        Key: the prefix and 32 hex digits (the journal's name). All of them expire 10 min after the last write, and
        hold at most 2 MiB together.

        NAME              hash of one journal:
          version   format, 1
          digest    64 hex digits: what the client asked
          life      32 hex digits, drawn when the request began
          epoch     decimal, from 1; a gateway that takes the request over adds 1; earlier epochs' writes are refused
          owner     incarnation of the gateway that continues it
          request   the request's id
          alias     its other name, below; empty: none
          choices   decimal: number of answers
          call      how the answers are generated, as the gateways encode it
          end:N     how answer N ended, as the gateways encode it; absent: it has not
        NAME:LIFE:N       string: token ids of answer N so far, 4 bytes each, little-endian
        NAME              string, 32 hex digits: another name of the journal of that name
        """
        return self.prefix + "journal:"

    @property
    def journal_expiry(self) -> str:
        """Sorted set of the names of all journals that are counted; the score is when each expires, in unix ms.

        This one and the other accounts of journals have no TTL, so that they are not evicted; they are empty soon
        after the last journal has expired.
        """
        return self.prefix + "journals.expiry"

    @property
    def journal_sizes(self) -> str:
        """Hash: name of a journal that is counted → its size in bytes, a space, its tenant."""
        return self.prefix + "journals.sizes"

    @property
    def journal_totals(self) -> str:
        """Hash: tenant → bytes of its journals; `*` → of all tenants' journals."""
        return self.prefix + "journals.totals"

    @property
    def journals_prefix(self) -> str:
        """Start of the keys of lists of tenants' journals; the tenant's name follows.

        Sorted sets of names; the score is when each was last written or claimed, in unix ms.
        """
        return self.prefix + "journals:"

    @property
    def file_prefix(self) -> str:
        """Start of the keys of files that clients have sent, and of those that batches have written.

        FILE     hash, there once the file is complete: tenant, filename, purpose, bytes, chunks (decimal), created and
                 expires (unix time in s)
        FILE:N   string: its bytes, in chunks from 0

        All of them expire with the file; those of a file that is still being sent, 10 min after the last of them.
        """
        return self.prefix + "file:"

    @property
    def files_prefix(self) -> str:
        """Start of the keys of lists of tenants' files; the tenant's name follows.

        Sorted sets of ids, all with score 0: ids are in the order in which files were made.
        """
        return self.prefix + "files:"

    @property
    def file_expiry(self) -> str:
        """Sorted set of the ids of all files that take room; the score is when each expires, in unix ms."""
        return self.prefix + "files.expiry"

    @property
    def file_sizes(self) -> str:
        """Hash: id of a file that takes room → its size in bytes, a space, its tenant."""
        return self.prefix + "files.sizes"

    @property
    def file_totals(self) -> str:
        """Hash: tenant → bytes of its files; `*` → of all tenants' files."""
        return self.prefix + "files.totals"

    @property
    def batch_prefix(self) -> str:
        """Start of the keys of batches, which expire 31 days after their creation.

        BATCH        hash, see `services.cluster.batches.Batch`; and what only scripts read:
          output_bytes, output_chunks, output_tail
                         size of the file of answers so far, its chunks, and the size of the last of these
          error_bytes, error_chunks, error_tail
                         the same for the file of rows that failed
        BATCH:done   string: bit N is 1 once row N has its one result; until the batch is over
        """
        return self.prefix + "batch:"

    @property
    def batches_prefix(self) -> str:
        """Start of the keys of lists of tenants' batches, as those of files."""
        return self.prefix + "batches:"

    @property
    def running_batches_prefix(self) -> str:
        """Start of the keys of lists of tenants' batches that are not over; the tenant's name follows.

        Sorted sets of ids; the score is when each was made, in unix ms.
        """
        return self.prefix + "batches.running:"

    @property
    def waiting_batches_prefix(self) -> str:
        """Start of the keys of queues of batches that a gateway may claim, see `services.cluster.pending_work`.

        REGION         sorted set of tenants; the score is when the tenant's oldest batch may be claimed, in unix ms
        REGION/TENANT  sorted set of ids; the score is when a gateway may claim each, in unix ms
        """
        return self.prefix + "batches.waiting:"

    @property
    def answer_prefix(self) -> str:
        """Start of the keys of stored answers and conversations; NAME, 32 hex digits, stands for tenant and id.

        NAME         hash, see `services.cluster.answers`: tenant, id, document and input (JSON), state (queued,
                     in_progress, over), created (unix time in s), changed (unix time in us of the last change), digest
                     (empty: it was never in the background); and of one in the background: key, body, headers, owner,
                     epoch, tries, has_events, num_earlier, regions; and blobs: the tokens of its pieces
        NAME:events  list of the events of its stream
        TOKEN        list of the pieces of a long document, input, body or event, see `services.cluster.answer_records`

        All of them expire together: --stored-answer-s after the answer is complete, and an hour later if it never is.
        """
        return self.prefix + "answer:"

    @property
    def answers_prefix(self) -> str:
        """Start of the keys of lists of tenants' answers that are complete; the tenant's name follows.

        Sorted sets of names; the score is when each was completed, in unix us.
        """
        return self.prefix + "answers:"

    @property
    def running_answers_prefix(self) -> str:
        """Start of the keys of lists of tenants' answers in the background that are not over, as those of others."""
        return self.prefix + "answers.running:"

    @property
    def answer_expiry(self) -> str:
        """Sorted set of the names of all answers that take room; the score is when each expires, in unix ms."""
        return self.prefix + "answers.expiry"

    @property
    def answer_sizes(self) -> str:
        """Hash: name of an answer that takes room → its size in bytes, a space, its tenant."""
        return self.prefix + "answers.sizes"

    @property
    def answer_totals(self) -> str:
        """Hash: tenant → bytes of its answers; `*` → of all tenants' answers."""
        return self.prefix + "answers.totals"

    @property
    def evictable_answers(self) -> str:
        """Sorted set of tenants; the score is the bytes of their complete answers, which may be evicted."""
        return self.prefix + "answers.evictable"

    @property
    def waiting_answers_prefix(self) -> str:
        """Start of the keys of queues of answers in the background that a gateway may claim, as those of batches."""
        return self.prefix + "answers.waiting:"
