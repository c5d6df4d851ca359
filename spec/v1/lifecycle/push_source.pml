/* The sources of push.pml, and what they have issued. */

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

inline hear_transfer() {
  if
  :: r >= low[w] && asked[p] -> /* it comes again: the answer is what is true now (KVP-SES-REPLY) */
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
    :: r < low[w] || seen[p] || r >= low[w] + WINDOW -> to_sink[w]!Failed,r,a,REFUSED
    :: else ->
      seen[p] = true; asked[p] = true;
      transfer_Transfer(source[p]);
      if
      :: source_open[w] && !refusing -> transfer_Accepted(source[p]); to_sink[w]!Accepted,r,a,0
      :: source_open[w] && refusing ->
        failures--; transfer_Failed(source[p]); refused[p] = true; to_sink[w]!Failed,r,a,ENGINE;
          printf("refuse %d %d\n", w, r)
      :: !source_open[w] -> transfer_Failed(source[p]); refused[p] = true; to_sink[w]!Failed,r,a,REFUSED
      fi
    fi
  fi
}

inline drained() {
  if
  :: drain[p] -> transfer_Drained(source[p]); to_sink[w]!Drained,r,1,!unprovable[p];
    drain[p] = false
  :: else
  fi
}

inline hear_abort() {
  if
  :: r < low[w] -> to_sink[w]!Drained,r,a,!unprovable[p] /* over: refused from now on */
  :: else ->
#ifdef WITHOUT_RECORD /* PROVEN needs a record (KVP-END-UNSEEN) */
    if
    :: !seen[p] -> to_sink[w]!Drained,r,a,1
    :: else ->
#else
    if
    :: !seen[p] -> seen[p] = true
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
  :: m == DoneAck && source_open[w] && r >= low[w] && seen[p] ->
    if :: source[p] == transfer_done || source[p] == transfer_failed || source[p] == transfer_aborting ->
      transfer_DoneAck(source[p]) :: else fi
  :: m == Error && source_open[w] && r >= low[w] && seen[p] ->
    if :: source[p] == transfer_done -> transfer_Error(source[p]) :: else fi
  :: else
  fi;
  forget()
}

/* A copy is over: Done, or Failed, or the Abort that waits is answered. */
inline copied(proof, well) {
  copying[p] = false; unprovable[p] = !proof;
  if
  :: source[p] == transfer_accepted && source_open[w] ->
    if
    :: well -> transfer_Done(source[p]); to_sink[w]!Done,r,1,0
    :: else -> transfer_Failed(source[p]); to_sink[w]!Failed,r,1,ENGINE
    fi
  :: else -> drained()
  fi;
  forget()
}

/* The source's side of one session. */
proctype Source(byte me) {
end: do
  :: d_step { alive[me] && nempty(to_source[me]) && ROOM(to_sink[me], 2); w = me; refusing = false; source_hears();
    DONE }
  :: d_step { /* the engine cannot have it */
    alive[me] && to_source[me]?[Transfer,_,_,_] && ROOM(to_sink[me], 2) && failures > 0; w = me; refusing = true;
      source_hears(); DONE
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
    for (one : 0 .. REQUESTS - 1) { flying[PART(me, one)] = false }
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
#define IN_FLIGHT(me, my) flying[PART(me, my)]
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
    IN_FLIGHT(me, my); IN_FLIGHT(me, my) = false; printf("land %d %d\n", me, my);
    CHECK(owner[PAGE(my)] == NAME(my), OWNED); DONE
  }
  :: d_step {
    alive[me] && copying[PART(me, my)] && ROOM(to_sink[me], 1) && WRITTEN(me, my);
    w = me; r = my; p = PART(w, r); printf("copied %d %d\n", w, r); copied(true, true); DONE
  }
#ifdef PIECE
  :: d_step { /* a piece of the packed stream goes to the sink */
    pieces > 0 && alive[me] && source_open[me] && copying[PART(me, my)] && AT(me, my) == transfer_accepted &&
      ROOM(to_sink[me], 1);
    pieces--; transfer_PIECE(AT(me, my)); to_sink[me]!PIECE,my,1,0; printf("piece %d %d\n", me, my);
      DONE
  }
#endif
  :: d_step { /* it fails, and writes of it may still land */
    failures > 0 && alive[me] && copying[PART(me, my)] && ROOM(to_sink[me], 1);
    w = me; r = my; p = PART(w, r); failures--; one = !IN_FLIGHT(me, my); printf("fails %d %d %d\n", w, r, one);
      copied(one, false); DONE
  }
  :: d_step {
    alive[me] && source_open[me] && my >= low[me] && AT(me, my) == transfer_done && ROOM(to_sink[me], 1) &&
      QUIET(me, my);
    to_sink[me]!Done,my,1,lied[PART(me, my)];
      printf("resend 1 %d Done %d 1\n", me, my); DONE
  }
  :: d_step {
    alive[me] && source_open[me] && my >= low[me] && AT(me, my) == transfer_failed && !refused[PART(me, my)] &&
      ROOM(to_sink[me], 1) && QUIET(me, my);
    to_sink[me]!Failed,my,1,ENGINE; printf("resend 1 %d Failed %d 1\n", me, my);
      DONE
  }
#if LIES > 0
  :: d_step { /* a Done that the sink refuses */
    lies > 0 && alive[me] && source_open[me] && copying[PART(me, my)] && AT(me, my) == transfer_accepted &&
    !IN_FLIGHT(me, my) && ROOM(to_sink[me], 1);
    lies--; p = PART(me, my); copying[p] = false; lied[p] = LIE; transfer_Done(source[p]);
      to_sink[me]!Done,my,1,LIE; printf("lie %d %d\n", me, my); DONE
  }
#endif
  od
}
