/*
 * The handoff of docs/protocol.md as a model for Spin: reserve, stream, seal, commit, abort and release of one request
 * in two attempts, with everything around them that may go wrong. tools/check_model.py verifies it.
 *
 * Who acts:
 *   Gateway     knows lives of D; a Sender begins whenever it likes, and decoding ends only where the gateway knows it
 *   Sender      one per attempt, at P; Poster is P's thread that reads pages and puts frames on the channel
 *   Receiver    one per attempt, at D; Placer is D's thread that verifies frames and copies them into pages
 *   Others      other requests at P and D: they take any page that is free or only kept, and use it as their own
 *   Faults      the network and the machines, MAX_FAULTS times in all
 *   Judge       speaks when nothing can happen any more
 *
 * The Link is a bag that holds each message at most once. So any two messages may overtake each other, at no cost;
 * losing one or getting one twice costs a fault. The channel's frames are another bag. Messages and frames survive the
 * crash of either side and may reach its next life.
 *
 * A deadline, a silent peer, a lost Link and a cancel are one and the same here: a side may give up at any time, and it
 * does give up before it waits for ever. Nothing goes in circles (a second run of Spin shows it), so each run reaches
 * the Judge.
 *
 * Each NO_... takes one fence out; Spin must then find a violation.
 */

#ifndef MAX_FAULTS
#define MAX_FAULTS 2
#endif
#ifndef CHUNKS
#define CHUNKS 1 /* 1 or 2, of one page each. D has as many pages, and page c is for chunk c */
#endif
#define ATTEMPTS 2
#define ALL (ATTEMPTS * CHUNKS)
#define AT(a, c) ((a) * CHUNKS + (c))
#define LAST (CHUNKS - 1)
/* With one chunk both halves say the same. */
#define EACH(array, a, value) (array[AT(a, 0)] == value && array[AT(a, LAST)] == value)
#define ANY(array, a, value) (array[AT(a, 0)] == value || array[AT(a, LAST)] == value)

mtype = { none, reserving, streaming, sealed, committing, committed, failed, over };
mtype = { queued, reading, posted, skipped };       /* a chunk at P */
mtype = { right, torn, others, blank };             /* what a frame or a page holds */
mtype = { wanted, copying, revoked, placed, lost }; /* the claim of a chunk at D */
mtype = { held, kept, taken };                      /* the pages of an attempt at P, all of them as one */

/* --- the Link and the channel --- */
bit reserve_sent[ATTEMPTS], header_sent[ALL], seal_sent[ATTEMPTS], abort_sent[ATTEMPTS];
bit granted_sent[ATTEMPTS], committed_sent[ATTEMPTS], refusal_sent[ATTEMPTS];
mtype frame[ALL] = none;
byte faults = MAX_FAULTS;

/* --- P --- */
mtype sender[ATTEMPTS] = none;
mtype chunk[ALL] = none;
mtype pages_at_p[ATTEMPTS] = none; /* those that attempt 0 and attempt 1 computed */
bit uses_kept;                     /* attempt 1 sends those that were kept of attempt 0 */
/* A generation never comes back: comparing it is asking whether somebody was given the page since it was noted. */
bit is_same_source[ATTEMPTS];
bit p_has_crashed;

/* --- D --- */
bit life, known_life;              /* D's incarnation, and the one that the gateway knows */
bit meant_life[ATTEMPTS];          /* the one that an attempt was sent to; all its messages carry it */
byte entered;                      /* the fence: attempts below this one are out */
mtype receiver[ATTEMPTS] = none;
bit is_asking[ATTEMPTS];           /* the worker has not answered to `reserve` yet */
bit is_sealed[ATTEMPTS];
mtype claim[ALL] = none;
bit is_decoding[ATTEMPTS];
byte owner[CHUNKS];                /* of D's pages: FREE, OTHER or an attempt */
bit is_same_page[ALL];
mtype content[CHUNKS] = none;

/* --- for the assertions only --- */
bit was_acknowledged[ATTEMPTS];    /* D said that it holds nothing for this attempt */
byte newest;                       /* what `entered` should be, whatever fences are in place */
bit was_committed;
byte num_takes = 1;                /* how often others may still take a page at D */

hidden byte i;

#define FREE 0
#define OTHER 9
#define OWN(a) (1 + (a))
#define NOBODY 9
byte in_copy = NOBODY; /* the chunk whose frame Placer copies right now */

#ifdef NO_INCARNATION_FENCE
#define IS_FOR_THIS_LIFE(a) true
#else
#define IS_FOR_THIS_LIFE(a) (meant_life[a] == life)
#endif
#ifdef NO_ATTEMPT_FENCE
#define IS_NEW(a) (!was_acknowledged[a]) /* what was cancelled stays out; what is merely older does not */
#else
#define IS_NEW(a) ((a) >= entered)
#endif
#ifdef NO_REVOKE
#define NOTHING_WRITES(a) true
#else
#define NOTHING_WRITES(a) (in_copy != AT(a, 0) && in_copy != AT(a, LAST))
#endif
#ifdef NO_SENDER_WAIT
#define NOTHING_READS(a) true
#else
#define NOTHING_READS(a) (!ANY(chunk, a, queued) && !ANY(chunk, a, reading))
#endif
#ifdef NO_SEAL_CHECK
#define IS_COMPLETE(a) (NOTHING_WRITES(a))
#else
#define IS_COMPLETE(a) EACH(claim, a, placed)
#endif
#ifdef NO_GENERATION
#define IS_SAME_PAGE(x) true
#define IS_SAME_SOURCE(a) true
#else
#define IS_SAME_PAGE(x) (is_same_page[x])
#define IS_SAME_SOURCE(a) (is_same_source[a])
#endif
#ifdef NO_DEADLINE
#define MAY_GIVE_UP false
#else
#define MAY_GIVE_UP true
#endif
#ifdef RELIABLE
#undef MAY_GIVE_UP
#define MAY_GIVE_UP false
#undef MAX_FAULTS
#define MAX_FAULTS 0
#endif

#define SOURCE(a) ((a) == 1 && !uses_kept)
#define IS_SENDING(a) (sender[a] == reserving || sender[a] == streaming || sender[a] == sealed)
#define IS_RECEIVING(a) (receiver[a] == reserving || receiver[a] == streaming)
#define HOLDS_PAGES(a) (owner[0] == OWN(a) || owner[LAST] == OWN(a))

/* A message is taken from the Link, or comes once more later. */
inline take(message)
{
	if
	:: message = 0
	:: faults > 0 -> faults--
	fi
}

/* ------------------------------------------------------------------ P */

/* What still comes for an ended transfer is ignored, so it may as well be forgotten. */
inline sender_ends(a, state)
{
	sender[a] = state;
	granted_sent[a] = 0;
	committed_sent[a] = 0;
	refusal_sent[a] = 0
}

/* Nor does anybody listen to what comes for a transfer that is over at D, but for its Reserve. */
inline tidy(a)
{
	if
	:: receiver[a] == over && (sender[a] == over || sender[a] == failed) ->
		seal_sent[a] = 0;
		abort_sent[a] = 0;
		for (i : AT(a, 0) .. AT(a, LAST)) {
			header_sent[i] = 0;
			frame[i] = (i == in_copy -> frame[i] : none)
		}
		i = 0
	:: else
	fi
}

inline send_chunk(x)
{
	chunk[x] = queued;
	header_sent[x] = 1
}

proctype Sender(byte a)
{
end:	do
	:: atomic { sender[a] == none ->
		sender[a] = reserving;
		meant_life[a] = known_life;
		reserve_sent[a] = 1;
		if
		:: a == 1 && pages_at_p[0] == kept -> uses_kept = 1 /* computed already: they are sent again */
		:: else
		fi;
		pages_at_p[SOURCE(a)] = held }
	:: atomic { sender[a] == reserving && granted_sent[a] -> granted_sent[a] = 0; sender[a] = streaming }
	:: atomic { sender[a] == streaming && chunk[AT(a, 0)] == none ->
		is_same_source[a] = 1;
		send_chunk(AT(a, 0)) }
	:: atomic { sender[a] == streaming && chunk[AT(a, 0)] != none && chunk[AT(a, LAST)] == none ->
		send_chunk(AT(a, LAST)) }
	:: atomic { sender[a] == streaming && EACH(chunk, a, posted) -> sender[a] = sealed; seal_sent[a] = 1 }
	:: atomic { sender[a] == sealed && committed_sent[a] -> sender_ends(a, committed) }
	:: atomic { IS_SENDING(a) && refusal_sent[a] -> sender_ends(a, failed) }
	:: atomic { IS_SENDING(a) && MAY_GIVE_UP -> sender_ends(a, failed); abort_sent[a] = 1 }
	:: atomic { (sender[a] == failed || sender[a] == committed) && NOTHING_READS(a) ->
		assert(!ANY(chunk, a, reading)); /* nobody is given pages that are still read */
		sender_ends(a, over);
		tidy(a);
		if
		:: pages_at_p[SOURCE(a)] == held && sender[1] == none -> pages_at_p[0] = kept
		:: else -> pages_at_p[SOURCE(a)] = none
		fi }
	od
}

#define MAY_READ(x) (chunk[x] == queued && !is_reading)
bit is_reading; /* one thread, so it reads for one chunk at a time */

inline begin_read(x)
{
	if
	:: IS_SENDING((x) / CHUNKS) -> chunk[x] = reading; is_reading = 1
	:: else -> chunk[x] = skipped; frame[x] = blank
	fi
}

inline end_read(x)
{
	is_reading = 0;
	if
	:: IS_SAME_SOURCE((x) / CHUNKS) ->
		chunk[x] = posted;
		frame[x] = (pages_at_p[SOURCE((x) / CHUNKS)] == taken -> others : right)
	:: else ->
		chunk[x] = skipped;
		if
		:: IS_SENDING((x) / CHUNKS) -> sender_ends((x) / CHUNKS, failed); abort_sent[(x) / CHUNKS] = 1
		:: else
		fi
	fi
}

proctype Poster()
{
end:	do
	:: atomic { MAY_READ(AT(0, 0)) -> begin_read(AT(0, 0)) }
	:: atomic { MAY_READ(AT(1, 0)) -> begin_read(AT(1, 0)) }
	:: atomic { chunk[AT(0, 0)] == reading -> end_read(AT(0, 0)) }
	:: atomic { chunk[AT(1, 0)] == reading -> end_read(AT(1, 0)) }
#if CHUNKS == 2
	:: atomic { MAY_READ(AT(0, 1)) && chunk[AT(0, 0)] != queued -> begin_read(AT(0, 1)) }
	:: atomic { MAY_READ(AT(1, 1)) && chunk[AT(1, 0)] != queued -> begin_read(AT(1, 1)) }
	:: atomic { chunk[AT(0, 1)] == reading -> end_read(AT(0, 1)) }
	:: atomic { chunk[AT(1, 1)] == reading -> end_read(AT(1, 1)) }
#endif
	od
}

/* ------------------------------------------------------------------ D */

inline receiver_fails(a)
{
	receiver[a] = failed;
	for (i : AT(a, 0) .. AT(a, LAST)) {
		if
		:: claim[i] == wanted || claim[i] == copying -> claim[i] = revoked
		:: else
		fi
	}
	i = 0
}

inline receiver_refuses(a)
{
	receiver_fails(a);
	tell(refusal_sent[a], a)
}

inline tell(message, a)
{
	if
	:: IS_SENDING(a) -> message = 1
	:: else
	fi
}

inline give_back(a)
{
	for (i : 0 .. LAST) {
		is_same_page[AT(a, i)] = 0;
		if
		:: owner[i] == OWN(a) -> owner[i] = FREE; content[i] = none
		:: else
		fi
	}
	i = 0
}

inline receiver_ends(a)
{
	receiver[a] = over;
	is_sealed[a] = 0;
	claim[AT(a, 0)] = revoked;
	claim[AT(a, LAST)] = revoked;
	tidy(a)
}

inline others_at_d(c)
{
	owner[c] = OTHER;
	content[c] = others;
	is_same_page[AT(0, c)] = 0;
	is_same_page[AT(1, c)] = 0
}

inline enter(a)
{
	if
	:: a == 1 && IS_RECEIVING(0) -> receiver_refuses(0) /* superseded */
	:: else
	fi;
	assert(!was_acknowledged[a]); /* D said that it holds nothing, and so it must stay */
	entered = a + 1;
	newest = (newest < a + 1 -> a + 1 : newest);
	receiver[a] = reserving;
	is_asking[a] = 1;
	is_sealed[a] = 0;
	claim[AT(a, 0)] = none;
	claim[AT(a, LAST)] = none
}

inline reserve(a)
{
	is_asking[a] = 0;
	if
	:: owner[0] == FREE && owner[LAST] == FREE ->
		for (i : 0 .. LAST) {
			owner[i] = OWN(a);
			is_same_page[AT(a, i)] = 1
		}
		i = 0;
		if
		:: receiver[a] == reserving -> receiver[a] = streaming; tell(granted_sent[a], a)
		:: else /* it failed meanwhile: the pages go straight back */
		fi
	:: else ->
		if
		:: receiver[a] == reserving -> tell(refusal_sent[a], a)
		:: else
		fi;
		receiver_ends(a)
	fi
}

inline take_header(a, c)
{
	header_sent[AT(a, c)] = 0;
	if
	:: IS_FOR_THIS_LIFE(a) && receiver[a] == streaming && claim[AT(a, c)] == none -> claim[AT(a, c)] = wanted
	:: else
	fi
}

inline read_pages(a)
{
	for (i : 0 .. LAST) {
		assert(owner[i] == OWN(a));
		assert(content[i] == right)
	}
	i = 0
}

inline end_decoding(a)
{
	read_pages(a);
	is_decoding[a] = 0;
	give_back(a);
	receiver_ends(a)
}

proctype Receiver(byte a)
{
end:	do
	/* What comes over the Link. */
	:: atomic { reserve_sent[a] ->
		take(reserve_sent[a]);
		if
		:: !IS_FOR_THIS_LIFE(a)
		:: IS_FOR_THIS_LIFE(a) && receiver[a] == streaming -> tell(granted_sent[a], a)
		:: IS_FOR_THIS_LIFE(a) && (receiver[a] == reserving || receiver[a] == committing || receiver[a] == failed)
		:: IS_FOR_THIS_LIFE(a) && (receiver[a] == none || receiver[a] == over || receiver[a] == committed) ->
			if
			:: IS_NEW(a) && !HOLDS_PAGES(a) -> enter(a)
			:: else -> tell(refusal_sent[a], a)
			fi
		fi }
	:: atomic { header_sent[AT(a, 0)] -> take_header(a, 0) }
#if CHUNKS == 2
	:: atomic { header_sent[AT(a, 1)] -> take_header(a, 1) }
#endif
	:: atomic { seal_sent[a] ->
		take(seal_sent[a]);
		if
		:: IS_FOR_THIS_LIFE(a) && receiver[a] == streaming -> is_sealed[a] = 1
		:: IS_FOR_THIS_LIFE(a) && receiver[a] == committed -> tell(committed_sent[a], a)
		:: IS_FOR_THIS_LIFE(a) && (receiver[a] == none || receiver[a] == over) -> tell(refusal_sent[a], a)
		:: else
		fi }
	:: atomic { abort_sent[a] && receiver[a] != committing -> /* while the worker takes the pages it waits */
		take(abort_sent[a]);
		if
		:: IS_FOR_THIS_LIFE(a) && is_decoding[a] -> end_decoding(a)
		:: IS_FOR_THIS_LIFE(a) && IS_RECEIVING(a) -> receiver_fails(a)
		:: IS_FOR_THIS_LIFE(a) && receiver[a] == none ->
			was_acknowledged[a] = 1;
#ifndef NO_CANCEL_FENCE
			entered = (entered < a + 1 -> a + 1 : entered)
#endif
		:: else /* over, or meant for somebody else */
		fi }
	:: atomic { IS_RECEIVING(a) && MAY_GIVE_UP -> receiver_refuses(a) }
	/* The worker's answers. */
	:: atomic { is_asking[a] -> reserve(a) }
	:: atomic { receiver[a] == streaming && is_sealed[a] && IS_COMPLETE(a) ->
		assert(a + 1 >= newest);       /* no commit of an attempt that was replaced here */
		assert(meant_life[a] == life); /* nor of one that was meant for a life that ended */
		if
		:: IS_SAME_PAGE(AT(a, 0)) && IS_SAME_PAGE(AT(a, LAST)) -> receiver[a] = committing
		:: else -> receiver_refuses(a)
		fi }
	:: atomic { receiver[a] == committing ->
		assert(in_copy != AT(a, 0) && in_copy != AT(a, LAST));
		read_pages(a);
		receiver[a] = committed;
		is_decoding[a] = 1;
		was_committed = 1;
		tell(committed_sent[a], a);
#ifdef SHOW_COMMIT
		assert(false)
#endif
		}
	:: atomic { receiver[a] == committing && MAY_GIVE_UP -> receiver_refuses(a) } /* the worker would not */
	:: atomic { receiver[a] == failed && !is_asking[a] && NOTHING_WRITES(a) -> give_back(a); receiver_ends(a) }
	/* Attention reads the pages until the answer ends, or the gateway cancels it. It knows only what it began. */
	:: atomic { is_decoding[a] && meant_life[a] == life -> end_decoding(a) }
	od
}

inline lose_chunk(x)
{
	claim[x] = lost;
	frame[x] = none;
	if
	:: IS_RECEIVING((x) / CHUNKS) -> receiver_refuses((x) / CHUNKS)
	:: else
	fi
}

#ifdef NO_CHECKSUM
#define IS_TORN(x) false
#else
#define IS_TORN(x) (frame[x] == torn)
#endif

inline begin_frame(x)
{
	if
	:: claim[x] == wanted && (frame[x] == blank || IS_TORN(x) || !IS_SAME_PAGE(x)) -> lose_chunk(x)
	:: claim[x] == wanted && !(frame[x] == blank || IS_TORN(x) || !IS_SAME_PAGE(x)) ->
		claim[x] = copying;
		in_copy = x
#ifdef NO_REPLAY_FENCE
	:: claim[x] == placed && frame[x] != blank -> in_copy = x
#endif
	:: else -> frame[x] = none
	fi
}

/* A frame waits for the header that claims it. */
#define MAY_COPY(x) (in_copy == NOBODY && frame[x] != none && claim[x] != none)

proctype Placer()
{
end:	do
	:: atomic { MAY_COPY(AT(0, 0)) -> begin_frame(AT(0, 0)) }
	:: atomic { MAY_COPY(AT(1, 0)) -> begin_frame(AT(1, 0)) }
#if CHUNKS == 2
	:: atomic { MAY_COPY(AT(0, 1)) -> begin_frame(AT(0, 1)) }
	:: atomic { MAY_COPY(AT(1, 1)) -> begin_frame(AT(1, 1)) }
#endif
	:: atomic { in_copy != NOBODY ->
		assert(owner[in_copy % CHUNKS] == OWN(in_copy / CHUNKS)); /* the page is still that transfer's */
		assert(!is_decoding[in_copy / CHUNKS]);                   /* and attention does not read it yet */
		content[in_copy % CHUNKS] = frame[in_copy];
		if
		:: frame[in_copy] = none
		:: faults > 0 -> faults-- /* it comes once more */
		fi;
		claim[in_copy] = (claim[in_copy] == copying -> placed : claim[in_copy]);
		in_copy = NOBODY }
	od
}

/* ------------------------------------------------------------------ around them */

proctype Gateway()
{
end:	do
	:: atomic { known_life != life -> known_life = life }
	od
}

inline others_at_p(b)
{
	pages_at_p[b] = taken;
	is_same_source[b] = 0;
	is_same_source[1] = (b == 0 && uses_kept -> 0 : is_same_source[1])
}

proctype Others()
{
end:	do
	:: atomic { pages_at_p[0] == kept -> others_at_p(0) }
	:: atomic { owner[0] == FREE && num_takes > 0 -> num_takes--; others_at_d(0) }
	:: atomic { owner[0] == OTHER -> assert(content[0] == others); owner[0] = FREE; content[0] = none }
#if CHUNKS == 2
	:: atomic { owner[1] == FREE && num_takes > 0 -> num_takes--; others_at_d(1) }
	:: atomic { owner[1] == OTHER -> assert(content[1] == others); owner[1] = FREE; content[1] = none }
#endif
	od
}

inline lose(message)
{
	faults--;
	message = 0
}

proctype Faults()
{
end:	do
	/* The network loses messages, and loses or changes frames. */
	:: atomic { faults > 0 && reserve_sent[0] -> lose(reserve_sent[0]) }
	:: atomic { faults > 0 && reserve_sent[1] -> lose(reserve_sent[1]) }
	:: atomic { faults > 0 && header_sent[AT(0, 0)] -> lose(header_sent[AT(0, 0)]) }
	:: atomic { faults > 0 && header_sent[AT(1, LAST)] -> lose(header_sent[AT(1, LAST)]) }
	:: atomic { faults > 0 && seal_sent[0] -> lose(seal_sent[0]) }
	:: atomic { faults > 0 && seal_sent[1] -> lose(seal_sent[1]) }
	:: atomic { faults > 0 && abort_sent[0] -> lose(abort_sent[0]) }
	:: atomic { faults > 0 && abort_sent[1] -> lose(abort_sent[1]) }
	:: atomic { faults > 0 && granted_sent[0] -> lose(granted_sent[0]) }
	:: atomic { faults > 0 && granted_sent[1] -> lose(granted_sent[1]) }
	:: atomic { faults > 0 && committed_sent[0] -> lose(committed_sent[0]) }
	:: atomic { faults > 0 && committed_sent[1] -> lose(committed_sent[1]) }
	:: atomic { faults > 0 && refusal_sent[0] -> lose(refusal_sent[0]) }
	:: atomic { faults > 0 && refusal_sent[1] -> lose(refusal_sent[1]) }
	:: atomic { faults > 0 && frame[AT(0, 0)] != none && in_copy != AT(0, 0) -> faults--; frame[AT(0, 0)] = none }
	:: atomic { faults > 0 && frame[AT(1, LAST)] != none && in_copy != AT(1, LAST) ->
		faults--; frame[AT(1, LAST)] = none }
	:: atomic { faults > 0 && frame[AT(0, 0)] == right && in_copy != AT(0, 0) -> faults--; frame[AT(0, 0)] = torn }
	:: atomic { faults > 0 && frame[AT(1, LAST)] == right && in_copy != AT(1, LAST) ->
		faults--; frame[AT(1, LAST)] = torn }
	/* A worker's books are wrong: it gives pages away that a transfer still holds. That it does so before P has noted
	   their generation, or while a copy at D is under way, is left out: no comparison could tell, or undo it. */
	:: atomic { faults > 0 && pages_at_p[0] == held && chunk[AT(uses_kept, 0)] != none ->
		faults--; others_at_p(0) }
	:: atomic { faults > 0 && owner[0] != FREE && owner[0] != OTHER && in_copy == NOBODY &&
			receiver[owner[0] - 1] == streaming ->
		faults--; others_at_d(0) }
	/* P dies, and a new life begins that knows nothing. */
	:: atomic { faults > 0 && !p_has_crashed && sender[0] != none ->
		faults--;
		p_has_crashed = 1;
		is_reading = 0;
		for (i : 0 .. 1) {
			pages_at_p[i] = none;
			if
			:: sender[i] != none ->
				sender_ends(i, over);
				chunk[AT(i, 0)] = skipped;
				chunk[AT(i, LAST)] = skipped;
				is_same_source[i] = 0
			:: else
			fi
		}
		i = 0 }
	/* D dies, and a new life begins that knows nothing. */
	:: atomic { faults > 0 && life == 0 ->
		faults--;
		life = 1;
		entered = 0;
		newest = 0;
		in_copy = NOBODY;
		for (i : 0 .. 1) {
			receiver[i] = none;
			is_asking[i] = 0;
			is_sealed[i] = 0;
			is_decoding[i] = 0;
			was_acknowledged[i] = 0
		}
		for (i : 0 .. LAST) {
			owner[i] = FREE;
			content[i] = none
		}
		for (i : 0 .. ALL - 1) {
			claim[i] = none;
			is_same_page[i] = 0
		}
		i = 0 }
	od
}

#define IS_GONE(a) (receiver[a] == none || receiver[a] == over || (receiver[a] == committed && !is_decoding[a]))

/* Nothing can happen any more: all has ended, and nobody holds a page. */
proctype Judge()
{
	timeout ->
	atomic {
		assert(sender[0] == over);
#ifndef RELIABLE
		assert(sender[1] == over);
#endif
		assert(IS_GONE(0) && IS_GONE(1));
		assert(owner[0] == FREE && owner[LAST] == FREE);
		assert(pages_at_p[0] != held && pages_at_p[1] != held);
#ifdef RELIABLE
		assert(was_committed) /* where nothing goes wrong, a transfer is committed */
#endif
	}
}

init
{
	atomic {
		run Gateway();
		run Sender(0);
		run Poster();
		run Receiver(0);
		run Placer();
#ifndef RELIABLE
		run Sender(1); /* at any time: the first may be over, or run on where nobody can stop it */
		run Receiver(1);
		run Others();
		run Faults();
#endif
		run Judge()
	}
}
