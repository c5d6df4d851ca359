/* Pages that source ranks write: who may use them, and when they are free again (transfers.md, Push and Ends).

   A write is issued by a source and lands later, whatever has become of the source since. `owner` is known to nobody: of
   each page, the request that it was granted to, until the sink uses it or has proof. A write that lands on a page of
   another owner breaks OWNED. */

#ifndef WRITERS
#define WRITERS 2
#endif
#ifndef REQUESTS
#define REQUESTS 2
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
#define PAGE(r) ((r) % PAGES)
#define NAME(r) (1 + (r))
#define IN_USE 255

mtype = { unasked, running, arrived, lost, quarantined, over }

chan to_source[WRITERS] = [QUEUE] of { mtype, byte, byte, byte };
chan to_sink[WRITERS] = [QUEUE] of { mtype, byte, byte, byte };

byte owner[PAGES];
bool flying[PARTS]; /* writes that are issued and have not landed */

/* the sink */
mtype phase[REQUESTS] = unasked;
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
bool seen[PARTS]; /* there is, or was, a record of it */
bool asked[PARTS]; /* by its Transfer, and not by Abort alone */
byte lied[PARTS]; /* LIE: its Done was wrong */
bool aborted[PARTS], refused[PARTS], copying[PARTS], drain[PARTS], unprovable[PARTS];
bool source_open[WRITERS] = true, alive[WRITERS] = true;
byte low[WRITERS]; /* the low-water mark */

byte aborts = ABORTS, failures = FAILURES, giving_up = LOST, deaths = DEATHS, lies = LIES, pieces = 1;
#define SHOW for (one : 0 .. PARTS - 1) { printf("now %d %e %e\n", one, sink[one], source[one]) }
byte w, r, a, p, k, x, all, refusing; /* a: a number that other models use, here always 1 */
mtype m;
#define DONE m = 0; w = 0; r = 0; a = 0; p = 0; k = 0; x = 0; all = 0; refusing = 0; SETTLED

#define ENGINE 0 /* why a Failed: it can not be had */
#define REFUSED 1
#define LIE 2

#include "push_sink.pml"
#include "push_source.pml"

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
          CHECK(FREE_OF(p, w) || unprovable[p] || !alive[w], RELEASED)
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
