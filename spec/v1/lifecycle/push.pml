/* Pages that source ranks write: who may use them, and when they are free again (transfers.md, Push and Ends).

   A write is issued by a source and lands later, whatever has become of the source since. `owner` is known to nobody: of
   each page, the attempt that it was granted to, until the sink uses it or has proof. A write that lands on a page of
   another owner breaks OWNED. */

#ifndef WRITERS
#define WRITERS 2
#endif
#ifndef REQUESTS
#define REQUESTS 2
#endif
#ifndef ATTEMPTS
#define ATTEMPTS 1
#endif
#ifndef PAGES
#define PAGES 1
#endif
#ifndef WINDOW /* max_transfers */
#define WINDOW 2
#endif
#ifndef ABORTS /* by the engine of the sink, whenever it likes */
#define ABORTS 1
#endif
#ifndef FAILURES /* of a copy or a prompt at the sources */
#define FAILURES 1
#endif
#ifndef LOST /* sessions that one side gives up while the other does not */
#define LOST 0
#endif
#ifndef DEATHS /* of a source */
#define DEATHS 0
#endif
#ifdef STAGED
#define PIECE Chunk
#define transfer_PIECE transfer_Chunk
#elif defined(INLINE)
#define PIECE Data
#define transfer_PIECE transfer_Data
#endif
#ifndef LIES /* a Done that the sink has to refuse */
#define LIES 0
#endif

#include "common.pml"

#define PART(w, r) ((w) * REQUESTS + (r))
#define PARTS (WRITERS * REQUESTS)
#define PAGE(r, a) (((r) + (a) - 1) % PAGES)
#define NAME(r, a) (1 + 2 * (r) + (a) - 1)
#define WRITE(w, r, a) (2 * PART(w, r) + (a) - 1)
#define IN_USE 255

mtype = { unasked, running, arrived, lost, quarantined, over }

chan to_source[WRITERS] = [QUEUE] of { mtype, byte, byte, byte };
chan to_sink[WRITERS] = [QUEUE] of { mtype, byte, byte, byte };

byte owner[PAGES];
bool flying[2 * PARTS]; /* writes that are issued and have not landed */

/* the sink */
mtype phase[REQUESTS] = unasked;
byte attempt[REQUESTS];
bool failing[REQUESTS];
mtype sink[PARTS] = transfer_new;
bool good[PARTS];   /* Done has come */
bool proven[PARTS]; /* Drained said PROVEN */
bool told[PARTS];   /* Drained said UNPROVABLE, or the writer is gone */
bool sink_open[WRITERS] = true;
#ifdef WITHOUT_CANCEL
bool pending[PARTS]; /* its Transfer is not answered */
#define PENDING(p, yes) pending[p] = yes
#else
#define PENDING(p, yes) skip
#endif
bool buried[WRITERS]; /* the transport has proof of the writer's death */

/* the sources */
mtype source[PARTS] = transfer_new;
byte seen[PARTS]; /* the attempt that is recorded */
bool asked[PARTS]; /* by its Transfer, and not by Abort alone */
byte lied[PARTS]; /* LIE: its Done was wrong */
bool aborted[PARTS], refused[PARTS], copying[PARTS], drain[PARTS], unprovable[2 * PARTS];
bool source_open[WRITERS] = true, alive[WRITERS] = true;
byte low[WRITERS]; /* the low-water mark */

byte aborts = ABORTS, failures = FAILURES, giving_up = LOST, deaths = DEATHS, lies = LIES, pieces = 1;
#define SHOW for (one : 0 .. PARTS - 1) { printf("now %d %e %e\n", one, sink[one], source[one]) }
byte w, r, a, p, k, x, all, refusing;
mtype m;
#define DONE m = 0; w = 0; r = 0; a = 0; p = 0; k = 0; x = 0; all = 0; refusing = 0; SETTLED

#define ENGINE 0 /* why a Failed: it can not be had */
#define REFUSED 1
#define LIE 2

/* The sink */

#if WRITERS > 1
#define ALL(what) (what[0] && what[1])
#define ALL_ROOM(n) (ROOM(to_source[0], n) && ROOM(to_source[1], n))
#else
#define ALL(what) what[0]
#define ALL_ROOM(n) ROOM(to_source[0], n)
#endif
#ifdef WITHOUT_ATTEMPT
#define MAY_TRY(r) (phase[r] == lost || phase[r] == running && failing[r])
#else
#define MAY_TRY(r) (phase[r] == lost) /* KVP-END-ATTEMPT */
#endif
#define RUNS(r) (phase[r] == unasked || phase[r] == running)
/* All before it are asked for, and no more than a window of them runs. */
#define BEFORE(r) (r == 0 || phase[r - 1] != unasked && (r < WINDOW || !RUNS(r - WINDOW)))
/* Nothing about the request is on its way: what comes again although its answer does is a repeat of the network. */
#define QUIET(w, r) (!(to_source[w]??[_,eval(r),_,_]) && !(to_sink[w]??[_,eval(r),_,_]))
#define FREE_OF(p, w) (good[p] || proven[p] || buried[w])

inline ask(next) {
#ifdef WITHOUT_ATTEMPT
  if :: next == 2 -> owner[PAGE(r, 1)] = 0 :: else fi; /* the first is taken for over */
#endif
  attempt[r] = next; failing[r] = false; phase[r] = running;
  owner[PAGE(r, next)] = NAME(r, next);
  for (w : 0 .. WRITERS - 1) {
    p = PART(w, r);
    sink[p] = transfer_new; good[p] = false; proven[p] = false; told[p] = false;
    transfer_Transfer(sink[p]); to_source[w]!Transfer,r,next,0; PENDING(p, true)
  }
}

/* Every routed rank whose Done is lacking is told to stop (KVP-END-FAILED). */
inline fail() {
  failing[r] = true;
  for (k : 0 .. WRITERS - 1) {
    p = PART(k, r);
    if
    :: !good[p] && !proven[p] && sink_open[k] && sink[p] != transfer_aborting ->
      transfer_Abort(sink[p]); to_source[k]!Abort,r,attempt[r],0
    :: else
    fi
  }
}

inline settle() {
  if
  :: phase[r] == running ->
    all = true;
    for (k : 0 .. WRITERS - 1) {
      p = PART(k, r);
#ifndef WITHOUT_SET /* KVP-TRN-SET: Done of one is not Done of all */
      if :: sink_open[k] && sink[p] != transfer_ended -> all = false :: else fi
#else
      if :: sink_open[k] && sink[p] != transfer_ended && (failing[r] || !good[PART(0, r)]) -> all = false :: else fi
#endif
    }
    if
    :: all && !failing[r] -> use()
    :: all && failing[r] -> phase[r] = quarantined; release()
    :: else
    fi
  :: phase[r] == quarantined -> release()
  :: else
  fi
}

inline use() {
  for (k : 0 .. WRITERS - 1) { CHECK(good[PART(k, r)] && !flying[WRITE(k, r, attempt[r])], WHOLE) }
  owner[PAGE(r, attempt[r])] = IN_USE; phase[r] = arrived;
  printf("arrived %d\n", r)
}

/* Pages that every writer is done with are free; a timeout frees nothing (KVP-END-REUSE). */
inline release() {
  all = true;
  for (k : 0 .. WRITERS - 1) {
    p = PART(k, r);
#ifdef WITHOUT_PROOF
    if :: !FREE_OF(p, k) && sink_open[k] && !proven[p] -> all = false :: else fi
#elif defined(WITHOUT_REUSE)
#else
    if :: !FREE_OF(p, k) -> all = false :: else fi
#endif
  }
  if
  :: all -> owner[PAGE(r, attempt[r])] = 0; phase[r] = lost; printf("free %d\n", r)
  :: else -> printf("quarantined %d\n", r)
  fi
}

inline sink_hears() {
  to_sink[w]?m,r,a,x;
  printf("deliver 1 %d %e %d %d\n", w, m, r, a);
  p = PART(w, r);
  if :: m == Accepted || m == Failed || m == Done -> PENDING(p, false) :: else fi;
  if
  :: a != attempt[r] -> /* about an attempt that is over */
    if :: (m == Done || m == Failed) && sink_open[w] -> to_source[w]!DoneAck,r,a,0 :: else fi
  :: else ->
    if
    :: phase[r] == quarantined && (m == Done || m == Drained) -> /* proof, however late (KVP-END-LATE) */
      if :: m == Done && x != LIE || m == Drained && x -> proven[p] = true :: else -> told[p] = true fi
    :: else
    fi;
    if
    :: !sink_open[w]
    :: sink_open[w] && m == Accepted ->
      if :: sink[p] == transfer_asked || sink[p] == transfer_aborting -> transfer_Accepted(sink[p]) :: else fi
    :: sink_open[w] && m == Failed ->
      to_source[w]!DoneAck,r,a,0;
      if
      :: sink[p] == transfer_asked || sink[p] == transfer_accepted ->
        transfer_Failed(sink[p]); transfer_DoneAck(sink[p]);
#ifdef WITHOUT_DOUBT /* Failed proves nothing of writes */
        proven[p] = true;
#endif
        fail()
      :: sink[p] == transfer_aborting -> transfer_Failed(sink[p])
      :: else
      fi
    :: sink_open[w] && m == Done && x == LIE && (sink[p] == transfer_asked || sink[p] == transfer_accepted) ->
      to_source[w]!Error,r,a,0; fail() /* KVP-TRN-REFUSE */
    :: sink_open[w] && m == Done && (x != LIE || sink[p] == transfer_ended || sink[p] == transfer_aborting) ->
      to_source[w]!DoneAck,r,a,0;
      if
      :: sink[p] == transfer_asked -> transfer_Accepted(sink[p]); transfer_Done(sink[p]); transfer_DoneAck(sink[p]); good[p] = true
      :: sink[p] == transfer_accepted -> transfer_Done(sink[p]); transfer_DoneAck(sink[p]); good[p] = true
      :: sink[p] == transfer_aborting -> transfer_Done(sink[p])
      :: else
      fi
#ifdef PIECE
    :: sink_open[w] && m == PIECE ->
      if :: sink[p] == transfer_asked -> transfer_Accepted(sink[p]) :: else fi;
      if :: sink[p] == transfer_accepted || sink[p] == transfer_aborting -> transfer_PIECE(sink[p]) :: else fi
#endif
    :: sink_open[w] && m == Drained ->
      if
      :: sink[p] == transfer_aborting ->
        transfer_Drained(sink[p]);
        if :: x -> proven[p] = true :: else -> told[p] = true fi
      :: else
      fi
    fi
  fi;
  settle()
}

/* The engine of the sink, for one request. */
proctype Engine(byte me) {
end: do
  :: d_step { /* ask for a request whose page is free; sequences are in order (KVP-TRN-SEQUENCE) */
    phase[me] == unasked && owner[PAGE(me, 1)] == 0 && ALL(sink_open) && ALL_ROOM(1) && BEFORE(me);
    r = me; printf("ask %d 1\n", r); ask(1); DONE
  }
#if ATTEMPTS > 1
  :: d_step { /* try a transfer again, on other pages (KVP-END-ATTEMPT) */
    MAY_TRY(me) && attempt[me] == 1 && owner[PAGE(me, 2)] == 0 && ALL(sink_open) && ALL_ROOM(1) && !good[PART(0, me)] && !good[PART(WRITERS - 1, me)];
    r = me; printf("ask %d 2\n", r); ask(2); DONE
  }
#endif
  :: d_step { /* abort it */
    aborts > 0 && phase[me] == running && !failing[me] && ALL_ROOM(1);
    r = me; aborts--; printf("abort %d\n", r); fail(); settle(); DONE
  }
  :: d_step { /* it has no more use for what it has received */
    phase[me] == arrived; r = me; owner[PAGE(r, attempt[r])] = 0; phase[r] = over; printf("use %d\n", r); DONE
  }
  od
}

/* The sink's side of one session. */
proctype Sink(byte me) {
end: do
  :: d_step { nempty(to_sink[me]) && ALL_ROOM(2); w = me; sink_hears(); DONE }
#if LOST > 0 || DEATHS > 0
  :: d_step { /* patience is over: this proves nothing (KVP-SES-DEAD) */
    sink_open[me] && (giving_up > 0 || !alive[me] || !source_open[me]) && ALL_ROOM(REQUESTS);
    w = me;
    if :: alive[w] && source_open[w] -> giving_up-- :: else fi;
    sink_open[w] = false; printf("sink_loses %d\n", w);
    for (one : 0 .. REQUESTS - 1) {
      r = one;
      if :: phase[r] == running && !good[PART(w, r)] && !failing[r] -> fail() :: else fi;
      settle()
    }; DONE
  }
#endif
#if DEATHS > 0 && (!defined(FABRIC) || defined(WITHOUT_TRANSPORT))
  :: d_step { /* the end of a process is proof for transports whose writes end with it (KVP-REG-DEATH) */
    !alive[me] && !buried[me] && !sink_open[me];
    w = me; buried[w] = true; printf("bury %d\n", w);
    for (one : 0 .. REQUESTS - 1) { r = one; if :: phase[r] == quarantined -> release() :: else fi }; DONE
  }
#endif
  od
}

/* What is not answered is sent again (KVP-SES-RESEND); Abort also after the session (KVP-END-LATE). */
proctype SinkAgain(byte me, my) {
end: do
  :: d_step {
    sink_open[me] && sink[PART(me, my)] == transfer_asked && phase[my] == running && QUIET(me, my);
    to_source[me]!Transfer,my,attempt[my],0; printf("resend 0 %d Transfer %d %d\n", me, my, attempt[my]); DONE
  }
#ifdef WITHOUT_CANCEL /* Abort ends the request that it aborts */
  :: d_step {
    sink_open[me] && pending[PART(me, my)] && sink[PART(me, my)] != transfer_asked && QUIET(me, my);
    to_source[me]!Transfer,my,attempt[my],0; printf("resend 0 %d Transfer %d %d\n", me, my, attempt[my]); DONE
  }
#endif
  :: d_step {
    ROOM(to_source[me], 1) &&
    (sink_open[me] && sink[PART(me, my)] == transfer_aborting ||
     phase[my] == quarantined && !FREE_OF(PART(me, my), me) && !told[PART(me, my)]) && QUIET(me, my);
    to_source[me]!Abort,my,attempt[my],0; printf("resend 0 %d Abort %d %d\n", me, my, attempt[my]); DONE
  }
  od
}

/* The sources */

inline forget() {
  do
  :: low[w] < REQUESTS ->
    if
    :: source[PART(w, low[w])] == transfer_ended && !copying[PART(w, low[w])] -> low[w]++
    :: else -> break
    fi
  :: else -> break
  od
}

#ifdef WITHOUT_ATTEMPT
#define RUNNING(p) false
#else
#define RUNNING(p) (source[p] != transfer_ended || copying[p]) /* KVP-TRN-ATTEMPT */
#endif

inline hear_transfer() {
  if
  :: r >= low[w] && seen[p] == a && asked[p] -> /* it comes again: the answer is what is true now (KVP-SES-REPLY) */
#ifdef WITHOUT_STATE /* replies are kept as bytes, and this one is there no more */
    CHECK(refused[p] || aborted[p] || source[p] == transfer_ended, REPEATED); to_sink[w]!Failed,r,a,REFUSED
#else
    if
    :: aborted[p] || refused[p] -> to_sink[w]!Failed,r,a,REFUSED
    :: else -> to_sink[w]!Accepted,r,a,0
    fi
#endif
  :: else ->
    if
    :: r >= low[w] && seen[p] == a && aborted[p] -> to_sink[w]!Failed,r,a,REFUSED
    :: r < low[w] || r >= low[w] && seen[p] >= a && !(seen[p] == a && aborted[p]) -> to_sink[w]!Failed,r,a,REFUSED
    :: r >= low[w] && seen[p] < a && (a != seen[p] + 1 || seen[p] > 0 && RUNNING(p)) -> to_sink[w]!Failed,r,a,REFUSED
    :: r >= low[w] + WINDOW && seen[p] < a -> to_sink[w]!Failed,r,a,REFUSED
    :: r >= low[w] && r < low[w] + WINDOW && seen[p] < a && a == seen[p] + 1 && !(seen[p] > 0 && RUNNING(p)) ->
      seen[p] = a; asked[p] = true; aborted[p] = false; refused[p] = false; drain[p] = false; source[p] = transfer_new;
      transfer_Transfer(source[p]);
      if
      :: source_open[w] && !refusing -> transfer_Accepted(source[p]); to_sink[w]!Accepted,r,a,0
      :: source_open[w] && refusing ->
        failures--; transfer_Failed(source[p]); refused[p] = true; to_sink[w]!Failed,r,a,ENGINE; printf("refuse %d %d\n", w, r)
      :: !source_open[w] -> transfer_Failed(source[p]); refused[p] = true; to_sink[w]!Failed,r,a,REFUSED
      fi
    fi
  fi
}

inline drained() {
  if
  :: drain[p] -> transfer_Drained(source[p]); to_sink[w]!Drained,r,seen[p],!unprovable[WRITE(w, r, seen[p])]; drain[p] = false
  :: else
  fi
}

inline hear_abort() {
  if
  :: r < low[w] || seen[p] > a -> to_sink[w]!Drained,r,a,!unprovable[WRITE(w, r, a)] /* over: refused from now on */
  :: else ->
#ifdef WITHOUT_RECORD /* PROVEN needs a record (KVP-END-UNSEEN) */
    if
    :: seen[p] < a -> to_sink[w]!Drained,r,a,1
    :: else ->
#else
    if
    :: seen[p] < a -> seen[p] = a; asked[p] = false; refused[p] = false; source[p] = transfer_new
    :: else
    fi;
    if
    :: true ->
#endif
      if :: source[p] != transfer_aborting -> transfer_Abort(source[p]) :: else -> transfer_Abort(source[p]) fi;
      aborted[p] = true; drain[p] = true;
#ifdef WITHOUT_WAITING /* for the copy (KVP-END-PROVEN) */
      drained()
#else
      if :: !copying[p] -> drained() :: else fi
#endif
    fi
  fi
}

inline source_hears() {
  to_source[w]?m,r,a,x;
  printf("deliver 0 %d %e %d %d\n", w, m, r, a);
  p = PART(w, r);
  if
  :: m == Transfer -> hear_transfer()
  :: m == Abort -> hear_abort()
  :: m == DoneAck && source_open[w] && r >= low[w] && seen[p] == a ->
    if :: source[p] == transfer_done || source[p] == transfer_failed || source[p] == transfer_aborting -> transfer_DoneAck(source[p]) :: else fi
  :: m == Error && source_open[w] && r >= low[w] && seen[p] == a ->
    if :: source[p] == transfer_done -> transfer_Error(source[p]) :: else fi
  :: else
  fi;
  forget()
}

/* A copy is over: Done, or Failed, or the Abort that waits is answered. */
inline copied(proof, well) {
  copying[p] = false; unprovable[WRITE(w, r, seen[p])] = !proof;
  if
  :: source[p] == transfer_accepted && source_open[w] ->
    if
    :: well -> transfer_Done(source[p]); to_sink[w]!Done,r,seen[p],0
    :: else -> transfer_Failed(source[p]); to_sink[w]!Failed,r,seen[p],ENGINE
    fi
  :: else -> drained()
  fi;
  forget()
}

/* The source's side of one session. */
proctype Source(byte me) {
end: do
  :: d_step { alive[me] && nempty(to_source[me]) && ROOM(to_sink[me], 2); w = me; refusing = false; source_hears(); DONE }
  :: d_step { /* the engine cannot have it */
    alive[me] && to_source[me]?[Transfer,_,_,_] && ROOM(to_sink[me], 2) && failures > 0; w = me; refusing = true; source_hears(); DONE
  }
#if LOST > 0
  :: d_step { /* patience is over at the source */
    alive[me] && source_open[me] && (giving_up > 0 || !sink_open[me]);
    if :: sink_open[me] -> giving_up-- :: else fi;
    source_open[me] = false; printf("source_loses %d\n", me); DONE
  }
#endif
#if DEATHS > 0
  :: d_step {
    deaths > 0 && alive[me]; deaths--; alive[me] = false; printf("dies %d\n", me);
#ifndef FABRIC /* writes are of the process, and end with it */
    for (one : 0 .. 2 * REQUESTS - 1) { flying[2 * PART(me, 0) + one] = false }
#endif
    DONE
  }
#endif
  :: d_step { LOSABLE(to_source[me]); lose(to_source[me], 0, me); DONE }
  :: d_step { LOSABLE(to_sink[me]); lose(to_sink[me], 1, me); DONE }
  :: d_step { REPEATABLE(to_source[me]); repeat(to_source[me], 0, me); DONE }
  :: d_step { REPEATABLE(to_sink[me]); repeat(to_sink[me], 1, me); DONE }
  :: d_step { MOVABLE(to_source[me]); overtake(to_source[me], 0, me); DONE }
  :: d_step { MOVABLE(to_sink[me]); overtake(to_sink[me], 1, me); DONE }
  od
}

#define AT(me, my) source[PART(me, my)]
#define IN_FLIGHT(me, my) flying[WRITE(me, my, seen[PART(me, my)])]
#ifdef WITHOUT_ORDER
#define WRITTEN(me, my) true
#else
#define WRITTEN(me, my) !IN_FLIGHT(me, my) /* KVP-TRN-ORDER */
#endif

/* The source's part in one request: its copy, and what it sends again until it is answered. */
proctype Copy(byte me, my) {
end: do
  :: d_step { /* the prompt is finished: the copy begins */
    alive[me] && source_open[me] && AT(me, my) == transfer_accepted && !copying[PART(me, my)] && my >= low[me];
    copying[PART(me, my)] = true; IN_FLIGHT(me, my) = true; printf("copy %d %d\n", me, my); DONE
  }
  :: d_step { /* what was issued lands: this asks nobody, and is in no queue */
    flying[WRITE(me, my, 1)]; r = my; flying[WRITE(me, my, 1)] = false; printf("land %d %d\n", me, my);
    CHECK(owner[PAGE(my, 1)] == NAME(my, 1), OWNED); DONE
  }
#if ATTEMPTS > 1
  :: d_step {
    flying[WRITE(me, my, 2)]; flying[WRITE(me, my, 2)] = false; printf("land %d %d\n", me, my);
    CHECK(owner[PAGE(my, 2)] == NAME(my, 2), OWNED); DONE
  }
#endif
  :: d_step {
    alive[me] && copying[PART(me, my)] && ROOM(to_sink[me], 1) && WRITTEN(me, my);
    w = me; r = my; p = PART(w, r); printf("copied %d %d\n", w, r); copied(true, true); DONE
  }
#ifdef PIECE
  :: d_step { /* a piece of the packed stream goes to the sink */
    pieces > 0 && alive[me] && source_open[me] && copying[PART(me, my)] && AT(me, my) == transfer_accepted && ROOM(to_sink[me], 1);
    pieces--; transfer_PIECE(AT(me, my)); to_sink[me]!PIECE,my,seen[PART(me, my)],0; printf("piece %d %d\n", me, my); DONE
  }
#endif
  :: d_step { /* it fails, and writes of it may still land */
    failures > 0 && alive[me] && copying[PART(me, my)] && ROOM(to_sink[me], 1);
    w = me; r = my; p = PART(w, r); failures--; one = !IN_FLIGHT(me, my); printf("fails %d %d %d\n", w, r, one); copied(one, false); DONE
  }
  :: d_step {
    alive[me] && source_open[me] && my >= low[me] && AT(me, my) == transfer_done && ROOM(to_sink[me], 1) && QUIET(me, my);
    to_sink[me]!Done,my,seen[PART(me, my)],lied[PART(me, my)]; printf("resend 1 %d Done %d %d\n", me, my, seen[PART(me, my)]); DONE
  }
  :: d_step {
    alive[me] && source_open[me] && my >= low[me] && AT(me, my) == transfer_failed && !refused[PART(me, my)] && ROOM(to_sink[me], 1) && QUIET(me, my);
    to_sink[me]!Failed,my,seen[PART(me, my)],ENGINE; printf("resend 1 %d Failed %d %d\n", me, my, seen[PART(me, my)]); DONE
  }
#if LIES > 0
  :: d_step { /* a Done that the sink refuses */
    lies > 0 && alive[me] && source_open[me] && copying[PART(me, my)] && AT(me, my) == transfer_accepted &&
    !IN_FLIGHT(me, my) && ROOM(to_sink[me], 1);
    lies--; p = PART(me, my); copying[p] = false; lied[p] = LIE; transfer_Done(source[p]); to_sink[me]!Done,my,seen[p],LIE; printf("lie %d %d\n", me, my); DONE
  }
#endif
  od
}

/* When nothing can happen any more, everything has ended, and what is not free waits for proof that cannot come. */
proctype Rest() {
  atomic {
    timeout;
    for (r : 0 .. REQUESTS - 1) {
      CHECK(phase[r] != running, ENDED);
      for (w : 0 .. WRITERS - 1) {
        p = PART(w, r);
        CHECK(!alive[w] || !source_open[w] || !sink_open[w] || source[p] == transfer_new || source[p] == transfer_ended, ENDED)
      }
      if
      :: phase[r] == quarantined ->
        all = false;
        for (w : 0 .. WRITERS - 1) {
          p = PART(w, r);
          if :: !FREE_OF(p, w) && (told[p] || !alive[w]) -> all = true :: else fi;
          CHECK(FREE_OF(p, w) || unprovable[WRITE(w, r, attempt[r])] || !alive[w], RELEASED)
        }
        CHECK(all, RELEASED)
      :: else
      fi
    }
  }
}

init {
  atomic {
    for (one : 0 .. WRITERS - 1) {
      run Sink(one); run Source(one);
      for (two : 0 .. REQUESTS - 1) { run SinkAgain(one, two); run Copy(one, two) }
    }
    for (two : 0 .. REQUESTS - 1) { run Engine(two) }
    run Rest()
  }
}
