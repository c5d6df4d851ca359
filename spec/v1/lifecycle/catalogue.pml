/* A list of cached pages that is told in pieces while pages come and go (tiers.md, Who has what; feature CATALOGUE).

   A Watched names one page. What a watcher has heard to the end, at a number, must be what the source had at that number: a watcher
   that is behind learns so from the next Kept, and one that is wrong never does. That breaks CURRENT. */

#define CATALOGUE
#define PAGES 2
#ifndef CHANGES
#define CHANGES 3 /* Kept in all */
#endif

#include "common.pml"

#define NONE 3
#define MORE 4

chan to_source[1] = [QUEUE] of { mtype, byte, byte, byte }; /* Watch: request, the page after which, 0 */
chan to_sink[1] = [QUEUE] of { mtype, byte, byte, byte };   /* Watched: request, number, page and MORE; Kept: number, page, whether it is there */

mtype sink = session_open, source = session_open;
byte had[CHANGES + 1]; /* at each number, a bit for each page */
byte number; /* of the last Kept */
bool watching;

byte known, heard, asked = 1, after; /* what the sink knows, at which number, its request, and the last page that was told + 1 */
bool listening, whole, pending = true;

byte r, n, x, p;
mtype m;
#define SHOW printf("now 0 %e %e\n", sink, source)
#define DONE m = 0; r = 0; n = 0; x = 0; p = 0; SETTLED
#define HAS(p) (had[number] & (1 << (p)))
#define QUIET (!(to_source[0]??[Watch,eval(asked),_,_]) && !(to_sink[0]??[Watched,eval(asked),_,_]))

inline ask() {
  asked++; pending = true; session_Watch(sink); to_source[0]!Watch,asked,after,0
}

/* Forget what was told, and ask from the beginning (KVP-CAT-GAP). */
inline again() {
  known = 0; after = 0; heard = 0; listening = false; whole = false; ask()
}

inline take(page, there) {
  if :: there -> known = known | (1 << page) :: else -> known = known & ~(1 << page) fi
}

inline sink_hears() {
  to_sink[0]?m,r,n,x; printf("deliver 1 0 %e %d %d\n", m, r, n);
  if
  :: m == Watched ->
    session_Watched(sink);
    if
    :: !pending || r != asked /* it answers a request that was withdrawn */
#ifndef WITHOUT_PIECE
    :: pending && r == asked && after != 0 && n != heard -> again() /* KVP-CAT-GAP */
    :: pending && r == asked && (after == 0 || n == heard) ->
#else
    :: pending && r == asked ->
#endif
      pending = false; listening = true; heard = n; p = x % MORE;
      if :: p != NONE -> take(p, true); after = p + 1 :: else fi;
      if :: x >= MORE -> ask() :: else -> whole = true; after = 0 fi
    fi
  :: m == Kept ->
    session_Kept(sink);
    if
    :: !listening /* the list will have it */
#ifndef WITHOUT_GAP
    :: listening && r != heard + 1 -> again() /* KVP-CAT-GAP */
    :: listening && r == heard + 1 ->
#else
    :: listening ->
#endif
      heard = r; take(n, x)
    fi
  fi;
  CHECK(!whole || known == had[heard], CURRENT)
}

inline source_hears() {
  to_source[0]?m,r,n,x; printf("deliver 0 0 %e %d %d\n", m, r, n);
  session_Watch(source); session_Watched(source); watching = true;
  p = n;
  do :: p < PAGES && !HAS(p) -> p++ :: else -> break od;
  if
  :: p == PAGES -> to_sink[0]!Watched,r,number,NONE
  :: p == 0 && HAS(1) -> to_sink[0]!Watched,r,number,MORE
  :: else -> to_sink[0]!Watched,r,number,p
  fi
}

proctype Changing() {
end: do
  :: d_step { number < CHANGES && ROOM(to_sink[0], 1);
    had[number + 1] = had[number] ^ 1; number++; printf("change 0\n");
    if :: watching -> session_Kept(source); to_sink[0]!Kept,number,0,HAS(0) != 0 :: else fi; DONE }
  :: d_step { number < CHANGES && ROOM(to_sink[0], 1);
    had[number + 1] = had[number] ^ 2; number++; printf("change 1\n");
    if :: watching -> session_Kept(source); to_sink[0]!Kept,number,1,HAS(1) != 0 :: else fi; DONE }
  od
}

proctype Talking() {
end: do
  :: d_step { nempty(to_source[0]) && ROOM(to_sink[0], 1); source_hears(); DONE }
  :: d_step { nempty(to_sink[0]) && ROOM(to_source[0], 1); sink_hears(); DONE }
  :: d_step { pending && QUIET && ROOM(to_source[0], 1); to_source[0]!Watch,asked,after,0;
    printf("resend 0 0 Watch %d %d\n", asked, after); DONE }
  :: d_step { LOSABLE(to_source[0]); lose(to_source[0], 0, 0); DONE }
  :: d_step { LOSABLE(to_sink[0]); lose(to_sink[0], 1, 0); DONE }
  :: d_step { REPEATABLE(to_source[0]); repeat(to_source[0], 0, 0); DONE }
  :: d_step { REPEATABLE(to_sink[0]); repeat(to_sink[0], 1, 0); DONE }
  :: d_step { MOVABLE(to_source[0]); overtake(to_source[0], 0, 0); DONE }
  :: d_step { MOVABLE(to_sink[0]); overtake(to_sink[0], 1, 0); DONE }
  od
}

/* When nothing can happen any more, the list has come to its end. */
proctype Rest() {
  atomic { timeout; CHECK(whole && !pending, ENDED) }
}

init { atomic { session_Watch(sink); to_source[0]!Watch,asked,0,0; run Changing(); run Talking(); run Rest() } }
