/* The sink of push.pml. */

#if WRITERS > 1
#define ALL(what) (what[0] && what[1])
#define ALL_ROOM(n) (ROOM(to_source[0], n) && ROOM(to_source[1], n))
#else
#define ALL(what) what[0]
#define ALL_ROOM(n) ROOM(to_source[0], n)
#endif
#ifdef WITHOUT_LATE
#define ASKED_LATE(p, w, r) false
#else
#define ASKED_LATE(p, w, r) (phase[r] == quarantined && !FREE_OF(p, w) && !told[p]) /* KVP-END-LATE */
#endif
#define RUNS(r) (phase[r] == unasked || phase[r] == running)
/* All before it are asked for, and no more than a window of them runs. */
#define BEFORE(r) (r == 0 || phase[r - 1] != unasked && (r < WINDOW || !RUNS(r - WINDOW)))
/* Nothing about the request is on its way: what comes again although its answer does is a repeat of the network. */
#define QUIET(w, r) (!(to_source[w]??[_,eval(r),_,_]) && !(to_sink[w]??[_,eval(r),_,_]))
#define FREE_OF(p, w) (good[p] || proven[p] || buried[w])

inline ask() {
  phase[r] = running; owner[PAGE(r)] = NAME(r);
  for (w : 0 .. WRITERS - 1) { p = PART(w, r); transfer_Transfer(sink[p]); to_source[w]!Transfer,r,1,0; PENDING(p, true) }
}

/* Every routed rank whose Done is lacking is told to stop (KVP-END-FAILED). */
inline fail() {
  failing[r] = true;
  for (k : 0 .. WRITERS - 1) {
    p = PART(k, r);
    if
    :: !good[p] && !proven[p] && sink_open[k] && sink[p] != transfer_aborting ->
      transfer_Abort(sink[p]); to_source[k]!Abort,r,1,0
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
  for (k : 0 .. WRITERS - 1) { CHECK(good[PART(k, r)] && !flying[PART(k, r)], WHOLE) }
  owner[PAGE(r)] = IN_USE; phase[r] = arrived;
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
  :: all -> owner[PAGE(r)] = 0; phase[r] = lost; printf("free %d\n", r)
  :: else -> printf("quarantined %d\n", r)
  fi
}

inline sink_hears() {
  to_sink[w]?m,r,a,x;
  printf("deliver 1 %d %e %d %d\n", w, m, r, a);
  p = PART(w, r);
  if :: m == Accepted || m == Failed || m == Done -> PENDING(p, false) :: else fi;
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
    :: sink[p] == transfer_asked -> transfer_Accepted(sink[p]); transfer_Done(sink[p]); transfer_DoneAck(sink[p]);
      good[p] = true
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
  fi;
  settle()
}

/* The engine of the sink, for one request. */
proctype Engine(byte me) {
end: do
  :: d_step { /* ask for a request whose page is free; sequences are in order (KVP-TRN-SEQUENCE) */
    phase[me] == unasked && owner[PAGE(me)] == 0 && ALL(sink_open) && ALL_ROOM(1) && BEFORE(me);
    r = me; printf("ask %d 1\n", r); ask(); DONE
  }
  :: d_step { /* abort it */
    aborts > 0 && phase[me] == running && !failing[me] && ALL_ROOM(1);
    r = me; aborts--; printf("abort %d\n", r); fail(); settle(); DONE
  }
  :: d_step { /* it has no more use for what it has received */
    phase[me] == arrived; r = me; owner[PAGE(r)] = 0; phase[r] = over; printf("use %d\n", r); DONE
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
#ifndef WITHOUT_RESEND
  :: d_step {
    sink_open[me] && sink[PART(me, my)] == transfer_asked && phase[my] == running && QUIET(me, my);
    to_source[me]!Transfer,my,1,0; printf("resend 0 %d Transfer %d 1\n", me, my); DONE
  }
#endif
#ifdef WITHOUT_CANCEL /* Abort ends the request that it aborts */
  :: d_step {
    sink_open[me] && pending[PART(me, my)] && sink[PART(me, my)] != transfer_asked && QUIET(me, my);
    to_source[me]!Transfer,my,1,0; printf("resend 0 %d Transfer %d 1\n", me, my); DONE
  }
#endif
  :: d_step {
    ROOM(to_source[me], 1) &&
    (sink_open[me] && sink[PART(me, my)] == transfer_aborting || ASKED_LATE(PART(me, my), me, my)) && QUIET(me, my);
    to_source[me]!Abort,my,1,0; printf("resend 0 %d Abort %d 1\n", me, my); DONE
  }
  od
}
