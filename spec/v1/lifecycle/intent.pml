/* Pages that are granted when they are of use (transfers.md, Draft: intent and Draft: spans): one source, one sink.

   A request has PIECES pages, which prefill computes one after the other, and which all requests share. Without SPANS the
   sink grants all of them when prefill is over; with SPANS one after the other. `owner` is known to nobody: of each page,
   the request that it was granted to, until the sink uses it or has proof. */

#define INTENT 1
#ifndef REQUESTS
#define REQUESTS 2
#endif
#ifndef PIECES
#define PIECES 2
#endif
#ifndef ABORTS /* by the engine of the sink */
#define ABORTS 1
#endif
#ifndef FAILURES /* of the source's engine */
#define FAILURES 1
#endif

#include "common.pml"

#define NAME(r) (1 + (r))
#define IN_USE 255
#define WRITE(r, i) ((r) * PIECES + (i))

mtype = { unasked, running, arrived, lost, over }

chan to_source = [QUEUE] of { mtype, byte, byte, byte }; /* request, 1, pieces that are granted */
chan to_sink = [QUEUE] of { mtype, byte, byte, byte };

byte owner[PIECES];
bool flying[REQUESTS * PIECES];

/* the sink */
mtype phase[REQUESTS] = unasked, sink[REQUESTS] = transfer_new;
bool failing[REQUESTS];
byte useful[REQUESTS];  /* pieces that the source has a use for */
byte granted[REQUESTS]; /* pieces that are the request's */
bool granting[REQUESTS]; /* a Grant is not answered */

/* the source */
mtype source[REQUESTS] = transfer_new;
bool asked[REQUESTS], aborted[REQUESTS], refused[REQUESTS], drain[REQUESTS];
byte computed[REQUESTS], given[REQUESTS], issued[REQUESTS];
#ifdef WITHOUT_AGAIN
bool said[REQUESTS];
#define UNSAID(r) !said[r]
#define SAID(r) said[r] = true
#else
#define UNSAID(r) true
#define SAID(r) skip
#endif

byte aborts = ABORTS, failures = FAILURES;
#define SHOW for (one : 0 .. REQUESTS - 1) { printf("now %d %e %e\n", one, sink[one], source[one]) }
byte r, a, x, i, all;
mtype m;
#define DONE m = 0; r = 0; a = 0; x = 0; i = 0; all = 0; SETTLED

#define QUIET(r) (!(to_source??[_,eval(r),_,_]) && !(to_sink??[_,eval(r),_,_]))
#if PIECES > 1
#define FLIES(r) (flying[WRITE(r, 0)] || flying[WRITE(r, 1)])
#else
#define FLIES(r) flying[WRITE(r, 0)]
#endif
#ifdef SPANS
#define USEFUL(r) computed[r]
#define MAY_GRANT(r) true /* ahead of what is computed, too */
#define NEXT(r) (granted[r] + 1)
#else
#define USEFUL(r) (computed[r] == PIECES -> PIECES : 0)
#define MAY_GRANT(r) (useful[r] == PIECES)
#define NEXT(r) PIECES
#endif

/* the sink */

inline fail() {
  failing[r] = true; granting[r] = false;
  if
  :: sink[r] != transfer_aborting -> transfer_Abort(sink[r]); to_source!Abort,r,1,0
  :: else
  fi
}

inline free() {
  for (i : 0 .. PIECES - 1) { if :: owner[i] == NAME(r) -> owner[i] = 0 :: else fi };
  phase[r] = lost; printf("free %d\n", r)
}

inline heard() {
  if :: sink[r] == transfer_asked -> transfer_Accepted(sink[r]) :: else fi
}

inline sink_hears() {
  to_sink?m,r,a,x;
  printf("deliver 1 0 %e %d %d\n", m, r, a);
  if
  :: m == Accepted ->
    if
    :: granting[r] && x == granted[r] -> granting[r] = false; transfer_Accepted(sink[r])
    :: sink[r] == transfer_asked || sink[r] == transfer_aborting -> transfer_Accepted(sink[r])
    :: else
    fi
  :: m == Progress ->
    if
    :: sink[r] == transfer_ended
    :: else -> heard(); transfer_Progress(sink[r]); if :: x > useful[r] -> useful[r] = x :: else fi
    fi
  :: m == Failed ->
    to_source!DoneAck,r,1,0;
    if
    :: sink[r] == transfer_asked || sink[r] == transfer_accepted ->
      transfer_Failed(sink[r]); transfer_DoneAck(sink[r]); fail()
    :: sink[r] == transfer_aborting -> transfer_Failed(sink[r])
    :: else
    fi
  :: m == Done ->
    to_source!DoneAck,r,1,0;
    if
    :: sink[r] == transfer_asked || sink[r] == transfer_accepted ->
      heard(); granting[r] = false; transfer_Done(sink[r]); transfer_DoneAck(sink[r]);
      CHECK(granted[r] == PIECES && issued[r] == PIECES && !FLIES(r), WHOLE);
      for (i : 0 .. PIECES - 1) { owner[i] = IN_USE };
      phase[r] = arrived; printf("arrived %d\n", r)
    :: sink[r] == transfer_aborting -> transfer_Done(sink[r])
    :: else
    fi
  :: m == Drained ->
    if :: sink[r] == transfer_aborting -> transfer_Drained(sink[r]); free() :: else fi
  fi
}

proctype Sink() {
end: do
  :: d_step { nempty(to_sink) && ROOM(to_source, 2); sink_hears(); DONE }
  :: d_step { LOSABLE(to_source); lose(to_source, 0, 0); DONE }
  :: d_step { LOSABLE(to_sink); lose(to_sink, 1, 0); DONE }
  :: d_step { REPEATABLE(to_source); repeat(to_source, 0, 0); DONE }
  :: d_step { REPEATABLE(to_sink); repeat(to_sink, 1, 0); DONE }
  :: d_step { MOVABLE(to_source); overtake(to_source, 0, 0); DONE }
  :: d_step { MOVABLE(to_sink); overtake(to_sink, 1, 0); DONE }
  od
}

/* Pages that a claim needs are free: those from `granted` on, up to the next Grant. */
#if PIECES > 1
#define FREE(r) (owner[granted[r]] == 0 && (NEXT(r) < PIECES || owner[PIECES - 1] == 0))
#else
#define FREE(r) (owner[0] == 0)
#endif

/* The engine of the sink, for one request, and what it sends again. */
proctype Engine(byte me) {
end: do
  :: d_step { /* ask, without a page */
    phase[me] == unasked && ROOM(to_source, 1) && (me == 0 || phase[me - 1] != unasked);
    phase[me] = running; transfer_Transfer(sink[me]); to_source!Transfer,me,1,0; printf("ask %d 1\n", me); DONE
  }
  :: d_step { /* claim pages, and grant them */
    phase[me] == running && !failing[me] && sink[me] == transfer_accepted && !granting[me] && granted[me] < PIECES &&
      MAY_GRANT(me) && FREE(me) && ROOM(to_source, 1);
    for (i : granted[me] .. NEXT(me) - 1) { owner[i] = NAME(me) };
    granted[me] = NEXT(me); granting[me] = true; transfer_Grant(sink[me]); to_source!Grant,me,1,granted[me];
      printf("grant %d %d\n", me, granted[me]); DONE
  }
  :: d_step {
    aborts > 0 && phase[me] == running && !failing[me] && ROOM(to_source, 1);
    r = me; aborts--; printf("abort %d\n", r); fail(); DONE
  }
  :: d_step { phase[me] == arrived; phase[me] = over; for (i : 0 .. PIECES - 1) { owner[i] = 0 }; printf("use %d\n", me);
    DONE }
  :: d_step {
    sink[me] == transfer_asked && phase[me] == running && QUIET(me) && ROOM(to_source, 1);
    to_source!Transfer,me,1,0; printf("resend 0 0 Transfer %d 1\n", me); DONE
  }
  :: d_step {
    granting[me] && QUIET(me) && ROOM(to_source, 1);
    to_source!Grant,me,1,granted[me]; printf("resend 0 0 Grant %d 1\n", me); DONE
  }
  :: d_step {
    sink[me] == transfer_aborting && QUIET(me) && ROOM(to_source, 1);
    to_source!Abort,me,1,0; printf("resend 0 0 Abort %d 1\n", me); DONE
  }
  od
}

/* the source */

inline drained() {
  if
  :: drain[r] && !FLIES(r) -> transfer_Drained(source[r]); to_sink!Drained,r,1,0; drain[r] = false
  :: else
  fi
}

inline source_hears() {
  to_source?m,r,a,x;
  printf("deliver 0 0 %e %d %d\n", m, r, a);
  if
  :: m == Transfer ->
    if
    :: aborted[r] || refused[r] -> to_sink!Failed,r,1,0
    :: !aborted[r] && !refused[r] && asked[r] -> to_sink!Accepted,r,1,0
    :: else -> asked[r] = true; transfer_Transfer(source[r]); transfer_Accepted(source[r]); to_sink!Accepted,r,1,0
    fi
  :: m == Grant ->
    if
    :: aborted[r] || refused[r] -> to_sink!Failed,r,1,0
    :: !aborted[r] && !refused[r] && x <= given[r] -> to_sink!Accepted,r,1,x
    :: else ->
#ifndef SPANS
      CHECK(computed[r] == PIECES, LEGAL);
#endif
      transfer_Grant(source[r]); transfer_Accepted(source[r]); given[r] = x; to_sink!Accepted,r,1,x
    fi
  :: m == Abort ->
    if :: source[r] != transfer_aborting -> transfer_Abort(source[r]) :: else -> transfer_Abort(source[r]) fi;
    aborted[r] = true; drain[r] = true; drained()
  :: m == DoneAck ->
    if
    :: source[r] == transfer_done || source[r] == transfer_failed || source[r] == transfer_aborting ->
      transfer_DoneAck(source[r])
    :: else
    fi
  fi
}

#ifdef WITHOUT_GRANTED
#define MAY_WRITE(r) true
#else
#define MAY_WRITE(r) (issued[r] < given[r]) /* KVP-INT-WRITE */
#endif
#ifdef WITHOUT_WHOLE
#define ALL(r) (issued[r] > 0 && issued[r] == given[r])
#else
#define ALL(r) (issued[r] == PIECES && given[r] == PIECES) /* KVP-SPN-WHOLE */
#endif

proctype Source() {
end: do
  :: d_step { nempty(to_source) && ROOM(to_sink, 2); source_hears(); DONE }
  od
}

proctype Prefill(byte me) {
end: do
  :: d_step { source[me] == transfer_accepted && computed[me] < PIECES; computed[me]++; printf("compute %d\n", me); DONE }
  :: d_step { /* and again, while items that are of use lack (KVP-INT-AGAIN) */
    source[me] == transfer_accepted && USEFUL(me) > given[me] && UNSAID(me) && QUIET(me) && ROOM(to_sink, 1);
    SAID(me); transfer_Progress(source[me]); to_sink!Progress,me,1,USEFUL(me);
      printf("progress %d %d\n", me, USEFUL(me)); DONE
  }
  :: d_step { /* what is both computed and granted */
    source[me] == transfer_accepted && issued[me] < computed[me] && MAY_WRITE(me);
    flying[WRITE(me, issued[me])] = true; issued[me]++; printf("copy 0 %d\n", me); DONE
  }
  :: d_step {
    flying[WRITE(me, 0)]; flying[WRITE(me, 0)] = false; r = me; printf("land 0 %d\n", me);
    CHECK(owner[0] == NAME(me), OWNED); DONE
  }
#if PIECES > 1
  :: d_step {
    flying[WRITE(me, 1)]; flying[WRITE(me, 1)] = false; r = me; printf("land 0 %d\n", me);
    CHECK(owner[1] == NAME(me), OWNED); DONE
  }
#endif
  :: d_step {
    source[me] == transfer_accepted && ALL(me) && !FLIES(me) && ROOM(to_sink, 1);
    transfer_Done(source[me]); to_sink!Done,me,1,0; printf("copied 0 %d\n", me); DONE
  }
  :: d_step {
    failures > 0 && source[me] == transfer_accepted && ROOM(to_sink, 1);
    failures--; transfer_Failed(source[me]); refused[me] = true; to_sink!Failed,me,1,0; printf("fails 0 %d 1\n", me);
      DONE
  }
  :: d_step { /* the Abort that waits for the copy is answered */
    drain[me] && !FLIES(me) && ROOM(to_sink, 1); r = me; printf("stopped %d\n", me); drained(); DONE
  }
  :: d_step {
    source[me] == transfer_done && QUIET(me) && ROOM(to_sink, 1);
    to_sink!Done,me,1,0; printf("resend 1 0 Done %d 1\n", me); DONE
  }
  :: d_step {
    source[me] == transfer_failed && QUIET(me) && ROOM(to_sink, 1);
    to_sink!Failed,me,1,0; printf("resend 1 0 Failed %d 1\n", me); DONE
  }
  od
}

/* When nothing can happen any more, everything has ended, and every page is free. */
proctype Rest() {
  atomic {
    timeout;
    for (r : 0 .. REQUESTS - 1) {
      CHECK(phase[r] == over || phase[r] == lost, ENDED);
      CHECK(source[r] == transfer_ended, ENDED)
    }
    for (i : 0 .. PIECES - 1) { CHECK(owner[i] == 0, RELEASED) }
  }
}

init {
  atomic {
    run Sink(); run Source(); run Rest();
    for (one : 0 .. REQUESTS - 1) { run Engine(one); run Prefill(one) }
  }
}
