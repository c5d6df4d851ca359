/* Items that a sink reads under a lease, with clocks of different speed (transfers.md, Draft: pull).

   Time is ticks of the source's clock;
     the sink's clock stands still for DRIFT of them. `changed` is known to nobody: the
   source has used its items for something else while the sink was reading them. A copy that is used although they were
   breaks UNCHANGED. */

#define PULL

#ifndef DRIFT
#define DRIFT 1
#endif
#ifndef LIES /* an Offer that the sink has to refuse */
#define LIES 1
#endif

#include "common.pml"

#define LEASE 4
#ifdef WITHOUT_MARGIN
#define COUNTED LEASE
#else
#define COUNTED (LEASE - DRIFT) /* KVP-PUL-SPEED */
#endif
#define TICKS 8
#define LIE 2

chan to_source[1] = [QUEUE] of { mtype, byte, byte, byte }; /* message, 0, 1, the sink's clock when a Renew was sent first */
chan to_sink[1] = [QUEUE] of { mtype, byte, byte, byte };

mtype sink = transfer_new, source = transfer_new;
byte source_clock, sink_clock, drift = DRIFT, lies = LIES, aborts = 1, renewals = 1;

/* the sink */
byte asked_at, sink_end, renewed_at;
bool renewing, reading, wrong, used, given_up, unproven;
/* the source */
byte source_end, granted;
bool lent, asked, aborted, lied, released;
bool changed; /* while somebody reads */

byte x;
mtype m;
#define DONE m = 0; x = 0; SETTLED
#define SHOW printf("now 0 %e %e\n", sink, source)
#define QUIET (len(to_source[0]) + len(to_sink[0]) == 0)
#define LATER(a, b) (a > b -> a : b)

inline stop() {
  wrong = true;
  if
  :: !reading && sink != transfer_aborting && sink != transfer_ended -> transfer_Abort(sink); renewing = false;
    to_source[0]!Abort,0,1,0
  :: else
  fi
}

inline sink_hears() {
  to_sink[0]?m,one,two,x; printf("deliver 1 0 %e 0 1\n", m);
  if
  :: m == Accepted -> if :: sink == transfer_asked || sink == transfer_aborting -> transfer_Accepted(sink) :: else fi
  :: m == Offer && sink == transfer_ended -> to_source[0]!Pulled,0,1,0 /* a transfer that is over reads nothing */
  :: m == Offer && sink == transfer_aborting -> transfer_Offer(sink)
  :: m == Offer && (sink == transfer_asked || sink == transfer_accepted) && x == LIE -> to_source[0]!Error,0,1,0; stop()
  :: m == Offer && (sink == transfer_asked || sink == transfer_accepted) && x != LIE ->
    if :: sink == transfer_asked -> transfer_Accepted(sink) :: else fi;
    transfer_Offer(sink);
#ifdef WITHOUT_FIRST /* the lease counts from the Offer's arrival, in place of from its Transfer */
    sink_end = sink_clock + COUNTED
#else
    sink_end = asked_at + COUNTED
#endif
  :: m == Renewed && renewing ->
    transfer_Renewed(sink); renewing = false; sink_end = LATER(sink_end, x + COUNTED)
  :: m == Renewed && sink == transfer_aborting -> transfer_Renewed(sink)
  :: m == Drained && sink == transfer_aborting -> transfer_Drained(sink)
  :: m == Released && sink == transfer_ended -> transfer_Released(sink)
  :: m == Error && renewing -> renewing = false; stop() /* Renew came too late */
  :: else
  fi
}

proctype Sink() {
end: do
  :: d_step { sink == transfer_new; asked_at = sink_clock; transfer_Transfer(sink); to_source[0]!Transfer,0,1,0;
    printf("ask 0 1\n"); DONE }
  :: d_step { nempty(to_sink[0]) && ROOM(to_source[0], 2); sink_hears(); DONE }
  :: d_step { sink == transfer_offered && !reading && !wrong && sink_clock < sink_end; reading = true;
    changed = false; printf("read\n"); DONE }
  :: d_step { reading && ROOM(to_source[0], 1);
    reading = false; printf("read_over\n");
    if
#ifdef WITHOUT_CHECK /* the lease is checked when a copy begins alone */
    :: !wrong ->
#else
    :: !wrong && sink_clock < sink_end -> /* KVP-PUL-READ */
#endif
      CHECK(!changed, UNCHANGED); used = true; transfer_Pulled(sink); renewing = false; to_source[0]!Pulled,0,1,0
    :: else -> stop()
    fi;
    DONE
  }
  :: d_step { sink == transfer_offered && !wrong && !renewing && renewals > 0 && sink_clock + 2 >= asked_at + LEASE &&
    ROOM(to_source[0], 1);
    renewals--; renewing = true; renewed_at = sink_clock; transfer_Renew(sink); to_source[0]!Renew,0,1,sink_clock;
      printf("renew\n"); DONE }
  :: d_step { aborts > 0 && !wrong && sink != transfer_new && sink != transfer_ended && ROOM(to_source[0], 1);
    aborts--; printf("abort 0\n"); stop(); DONE }
  :: d_step { sink == transfer_asked && QUIET; to_source[0]!Transfer,0,1,0; printf("resend 0 0 Transfer 0 1\n"); DONE }
  :: d_step { sink == transfer_aborting && QUIET; to_source[0]!Abort,0,1,0; printf("resend 0 0 Abort 0 1\n"); DONE }
  :: d_step { renewing && QUIET; to_source[0]!Renew,0,1,renewed_at; printf("resend 0 0 Renew 0 1\n"); DONE }
  od
}

inline source_hears() {
  to_source[0]?m,one,two,x; printf("deliver 0 0 %e 0 1\n", m);
  if
  :: m == Transfer && !asked && !aborted -> asked = true; transfer_Transfer(source); transfer_Accepted(source);
    to_sink[0]!Accepted,0,1,0
  :: m == Transfer && asked && !aborted -> to_sink[0]!Accepted,0,1,0
  :: m == Abort ->
    if :: source != transfer_ended || !aborted -> transfer_Abort(source); transfer_Drained(source) :: else fi;
    aborted = true; lent = false; to_sink[0]!Drained,0,1,1
  :: m == Pulled && source == transfer_offered -> lent = false; released = true; transfer_Pulled(source);
    to_sink[0]!Released,0,1,0
  :: m == Error && source == transfer_offered -> lent = false; transfer_Error(source)
  :: m == Renew && lent && (source_clock < source_end || granted == x + 1) ->
    if :: granted != x + 1 -> transfer_Renew(source); transfer_Renewed(source); granted = x + 1;
      source_end = LATER(source_end, source_clock + LEASE) :: else fi;
    to_sink[0]!Renewed,0,1,x
#ifdef WITHOUT_RENEW /* a lease that has ended is renewed */
  :: m == Renew && lent && source_clock >= source_end && granted != x + 1 ->
    granted = x + 1; source_end = source_clock + LEASE; to_sink[0]!Renewed,0,1,x
#else
  :: m == Renew && !(lent && (source_clock < source_end || granted == x + 1)) ->
    to_sink[0]!Error,0,1,0 /* KVP-PUL-RENEW */
#endif
  :: else
  fi
}

proctype Source() {
end: do
  :: d_step { nempty(to_source[0]) && ROOM(to_sink[0], 1); source_hears(); DONE }
  :: d_step { source == transfer_accepted && ROOM(to_sink[0], 1); lent = true; source_end = source_clock + LEASE;
    transfer_Offer(source);
    to_sink[0]!Offer,0,1,0; printf("offer\n"); DONE }
  :: d_step { lies > 0 && source == transfer_accepted && ROOM(to_sink[0], 1); lies--; lied = true; lent = true;
    source_end = source_clock + LEASE;
    transfer_Offer(source); to_sink[0]!Offer,0,1,LIE; printf("lie 0 0\n"); DONE }
  :: d_step { source == transfer_offered && QUIET; to_sink[0]!Offer,0,1,(lied -> LIE : 0);
    printf("resend 1 0 Offer 0 1\n"); DONE }
  :: d_step { /* its items are used for something else (KVP-PUL-OFFER) */
#ifdef WITHOUT_LEASE
    source == transfer_offered && !changed && reading;
#else
    (source == transfer_offered || source == transfer_ended) && (!lent || source_clock >= source_end) && !changed &&
      reading;
#endif
    changed = true; printf("change\n"); DONE }
  :: d_step { LOSABLE(to_source[0]); lose(to_source[0], 0, 0); DONE }
  :: d_step { LOSABLE(to_sink[0]); lose(to_sink[0], 1, 0); DONE }
  :: d_step { REPEATABLE(to_source[0]); repeat(to_source[0], 0, 0); DONE }
  :: d_step { REPEATABLE(to_sink[0]); repeat(to_sink[0], 1, 0); DONE }
  :: d_step { MOVABLE(to_source[0]); overtake(to_source[0], 0, 0); DONE }
  :: d_step { MOVABLE(to_sink[0]); overtake(to_sink[0], 1, 0); DONE }
  od
}

proctype Clocks() {
end: do
  :: d_step { source_clock < TICKS; source_clock++; sink_clock++; printf("tick\n"); DONE }
  :: d_step { source_clock < TICKS && drift > 0; source_clock++; drift--; printf("slow_tick\n"); DONE }
  od
}

/* When nothing can happen any more, both sides have ended and nothing is read. */
proctype Rest() {
  atomic {
    timeout;
    CHECK(sink == transfer_ended && !reading && QUIET, ENDED);
    CHECK(source == transfer_ended || source == transfer_new, RELEASED)
  }
}

init { atomic { run Sink(); run Source(); run Clocks(); run Rest() } }
