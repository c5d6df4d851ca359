/* Two runs of a sink rank and two of a source rank, of which the earlier ones may go on (session.md, Incarnations).

   A run that is replaced is not dead: it may be stopped, and come back. Frames wait in queues that outlive both sides, so
   what was sent to one run of the source is read by the next. Each run of the sink has a page of its own, asks for one
   transfer, gives it up or not, and lends its page to somebody else once it has proof. A write that lands then breaks OWNED;
   a copy for a run of the sink that the source knows to be replaced breaks SUPERSEDED. */

#include "common.pml"

#define IDS 4 /* session ids, of all runs; 0 is none */
#define RUNS 2

mtype = { dialing, idle, waiting, stopping, unsure, free_again }

chan to_source[1] = [QUEUE] of { mtype, byte, byte, byte }; /* message, run of the sink, session id, proof or session to resume */
chan to_sink[RUNS] = [QUEUE] of { mtype, byte, byte, byte };

/* sinks */
mtype phase[RUNS] = dialing;
byte id[RUNS];
bool begun[RUNS], resuming[RUNS], mine[RUNS]; /* mine: the page is granted to the one transfer of its run */

/* sources: what each run holds, by session id */
byte current, minted[RUNS], held[RUNS], aborts = 2, restarts = 1;
byte who[2 * 5]; /* run of the sink + 1 */
bool over[2 * 5], asked[2 * 5], aborted[2 * 5], copying[2 * 5], flying[2 * 5], wrote[2 * 5], drain[2 * 5];
#define AT(run, number) ((run) * (IDS + 1) + (number))

byte r, s, x, k, p, found;
mtype m;
#define DONE m = 0; r = 0; s = 0; x = 0; k = 0; p = 0; found = 0; SETTLED
#define QUIET(me) (!(to_source[0]??[_,eval(me),_,_]) && empty(to_sink[me]))

inline sink_hears() {
  to_sink[r]?m,k,s,x; printf("sink %d hears %e %d %d\n", r, m, s, x);
  if
  :: m == Welcome && phase[r] == dialing -> phase[r] = idle; id[r] = s
  :: m == Welcome && resuming[r] ->
    resuming[r] = false;
    if :: s != id[r] && (phase[r] == waiting || phase[r] == stopping) -> phase[r] = unsure :: else fi /* KVP-SES-RESUMED */
  :: m == Refused && phase[r] == dialing -> phase[r] = free_again
  :: m == Refused && resuming[r] ->
    resuming[r] = false;
    if :: phase[r] == waiting || phase[r] == stopping -> phase[r] = unsure :: else fi
  :: m == Done && s == id[r] && mine[r] -> phase[r] = free_again; mine[r] = false
  :: m == Drained && s == id[r] && x && mine[r] && phase[r] != waiting -> phase[r] = free_again; mine[r] = false
  :: m == Error && s == id[r] && (phase[r] == waiting || phase[r] == stopping) && !resuming[r] -> resuming[r] = true
  :: else
  fi
}

proctype Sink(byte me) {
end: do
  :: d_step { me == 1 && !begun[1]; begun[1] = true; printf("sink 1 starts\n"); DONE }
  :: d_step { begun[me] && (phase[me] == dialing || resuming[me]) && ROOM(to_source[0], 1) && QUIET(me);
    to_source[0]!Hello,me,0,id[me]; printf("sink %d says Hello %d\n", me, id[me]); DONE }
  :: d_step { phase[me] == idle && ROOM(to_source[0], 1); mine[me] = true; phase[me] = waiting;
    to_source[0]!Transfer,me,id[me],0; printf("sink %d says Transfer %d\n", me, id[me]); DONE }
  :: d_step { phase[me] == waiting && aborts > 0 && ROOM(to_source[0], 1); aborts--; phase[me] = stopping;
    to_source[0]!Abort,me,id[me],0; printf("sink %d says Abort %d\n", me, id[me]); DONE }
  :: d_step { phase[me] == waiting && !resuming[me] && ROOM(to_source[0], 1) && QUIET(me);
    to_source[0]!Transfer,me,id[me],0; printf("sink %d says Transfer %d\n", me, id[me]); DONE }
  :: d_step { phase[me] == stopping && !resuming[me] && ROOM(to_source[0], 1) && QUIET(me);
    to_source[0]!Abort,me,id[me],0; printf("sink %d says Abort %d\n", me, id[me]); DONE }
  :: d_step { nempty(to_sink[me]); r = me; sink_hears(); DONE }
  :: d_step { LOSABLE(to_sink[me]); lose(to_sink[me], 1, me); DONE }
  :: d_step { REPEATABLE(to_sink[me]); repeat(to_sink[me], 1, me); DONE }
  od
}

inline supersede() {
  for (one : 1 .. IDS) {
    if :: who[AT(current, one)] != 0 && who[AT(current, one)] - 1 < r -> over[AT(current, one)] = true :: else fi
  }
}

inline source_hears() {
  to_source[0]?m,r,s,x; printf("source %d hears %e of sink %d, %d\n", current, m, r, s);
  p = AT(current, s);
  if
#ifndef WITHOUT_INCARNATION /* KVP-SES-SUPERSEDE */
  :: m == Hello && r + 1 < held[current] -> to_sink[r]!Refused,r,0,0
  :: m == Hello && r + 1 >= held[current] ->
#else
  :: m == Hello ->
#endif
    held[current] = r + 1;
    supersede();
    for (one : 1 .. IDS) { if :: who[AT(current, one)] == r + 1 && !over[AT(current, one)] -> found = one :: else fi }
    if
    :: found == 0 && minted[current] < 2 ->
      minted[current]++;
#ifndef WITHOUT_FRESH /* KVP-SES-GUESS */
      found = 2 * current + minted[current]
#else
      found = minted[current]
#endif
      ;
      who[AT(current, found)] = r + 1
    :: else
    fi;
    if :: found != 0 -> to_sink[r]!Welcome,r,found,0 :: else -> to_sink[r]!Refused,r,0,0 fi
  :: m != Hello && (s == 0 || who[p] != r + 1) ->
#ifndef WITHOUT_UNKNOWN /* KVP-END-INCARNATION: what this run does not know, another may have accepted */
    to_sink[r]!Error,r,s,0
#else
    if :: m == Abort -> to_sink[r]!Drained,r,s,1 :: else -> to_sink[r]!Error,r,s,0 fi
#endif
  :: m == Transfer && s != 0 && who[p] == r + 1 ->
    if
#ifndef WITHOUT_REPLACED /* KVP-SES-REPLACED */
    :: over[p] -> to_sink[r]!Error,r,s,0
    :: !over[p] && !aborted[p] && !asked[p] -> asked[p] = true
#else
    :: !aborted[p] && !asked[p] -> asked[p] = true
#endif
    :: else -> if :: asked[p] && wrote[p] && !aborted[p] -> to_sink[r]!Done,r,s,0 :: else fi
    fi
  :: m == Abort && s != 0 && who[p] == r + 1 ->
    aborted[p] = true;
    if :: copying[p] -> drain[p] = true :: else -> to_sink[r]!Drained,r,s,1 fi
  fi
}

#define OPEN(number) (who[AT(current, number)] != 0)
#define COPIES(number) \
  :: d_step { current < RUNS && OPEN(number) && asked[AT(current, number)] && !aborted[AT(current, number)] && BEGINS(AT(current, number)) && !copying[AT(current, number)] && !wrote[AT(current, number)]; \
    p = AT(current, number); CHECK(who[p] == held[current], SUPERSEDED); copying[p] = true; flying[p] = true; printf("source %d copies for %d\n", current, number); DONE } \
  :: d_step { copying[AT(0, number)] && !flying[AT(0, number)]; p = AT(0, number); r = who[p] - 1; s = number; over_copy(); DONE } \
  :: d_step { copying[AT(1, number)] && !flying[AT(1, number)]; p = AT(1, number); r = who[p] - 1; s = number; over_copy(); DONE } \
  :: d_step { flying[AT(0, number)]; p = AT(0, number); r = who[p] - 1; s = number; printf("a write of source 0 for %d lands\n", s); flying[p] = false; CHECK(mine[r] && id[r] == s, OWNED); DONE } \
  :: d_step { flying[AT(1, number)]; p = AT(1, number); r = who[p] - 1; s = number; printf("a write of source 1 for %d lands\n", s); flying[p] = false; CHECK(mine[r] && id[r] == s, OWNED); DONE }

#ifndef WITHOUT_REPLACED
#define BEGINS(p) !over[p]
#else
#define BEGINS(p) true
#endif

/* A copy is over; a run that was replaced says so too, if it still can. */
inline over_copy() {
  copying[p] = false; wrote[p] = true;
  if
  :: !ROOM(to_sink[r], 1)
  :: else -> if :: drain[p] || aborted[p] -> to_sink[r]!Drained,r,s,1 :: !drain[p] && !aborted[p] && !over[p] -> to_sink[r]!Done,r,s,0 :: else fi
  fi;
  printf("the copy for %d is over\n", s)
}

proctype Source() {
end: do
  :: d_step { nempty(to_source[0]) && ROOM(to_sink[0], 1) && ROOM(to_sink[1], 1); source_hears(); DONE }
  :: d_step { restarts > 0; restarts--; current++; printf("source %d takes over\n", current); DONE }
  COPIES(1)
  COPIES(2)
  COPIES(3)
  COPIES(4)
  :: d_step { LOSABLE(to_source[0]); lose(to_source[0], 0, 0); DONE }
  :: d_step { REPEATABLE(to_source[0]); repeat(to_source[0], 0, 0); DONE }
  :: d_step { MOVABLE(to_source[0]); overtake(to_source[0], 0, 0); DONE }
  od
}

init { atomic { begun[0] = true; run Sink(0); run Sink(1); run Source() } }
