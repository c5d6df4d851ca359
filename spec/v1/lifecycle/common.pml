/* What the models share: how a broken property is told, how rows are counted, and what a network does to frames.

   A step is one `d_step`. Scratch variables are 0 between steps (DONE), so that they make no states of their own. What is
   not in a budget happens any number of times. */

mtype = { LEGAL, OWNED, WHOLE, REPEATED, ENDED, RELEASED, SUPERSEDED, UNCHANGED, CURRENT }

#define BROKEN(property) printf("broken %e\n", property); assert(false)
#define CHECK(condition, property) if :: (condition) :: else -> BROKEN(property) fi

#define SOUGHT 47110815 /* no row; a search for one row puts its number here (tools/model/pan.py) */
#define ROW(n, before, message, after) printf("row %e %e %e\n", before, message, after); assert(n != SOUGHT)

#ifdef TOLD /* after each step, where both sides are: for traces that are replayed */
#define SETTLED SHOW; a_message = 0; one = 0; two = 0; three = 0
#else
#define SETTLED a_message = 0; one = 0; two = 0; three = 0
#endif

#include "moves.pml"

#ifndef QUEUE
#define QUEUE 5 /* frames that wait in one direction of one connection; of more, one is lost */
#endif
#ifndef TROUBLES
#define TROUBLES 2 /* frames that the network loses, repeats or lets others overtake, in all */
#endif

byte troubles = TROUBLES;
mtype a_message;
byte one, two, three;

#define ROOM(queue, frames) (len(queue) <= QUEUE - (frames))

/* What may happen to the first frame of a queue; where it is almost full, a frame is lost for nothing. */
#define LOSABLE(queue) (nempty(queue) && (troubles > 0 || !ROOM(queue, 2)))
inline lose(queue, towards, w) {
  queue?a_message,one,two,three;
  if :: troubles > 0 -> troubles-- :: else fi;
  printf("lose %d %d %e %d %d\n", towards, w, a_message, one, two)
}
#ifdef ONLY_LOSSES
#define REPEATABLE(queue) false
#define MOVABLE(queue) false
#else
#define REPEATABLE(queue) (nempty(queue) && troubles > 0 && ROOM(queue, 1))
#define MOVABLE(queue) (len(queue) > 1 && troubles > 0)
#endif
inline repeat(queue, towards, w) {
  queue?<a_message,one,two,three>; queue!a_message,one,two,three; troubles--;
  printf("repeat %d %d %e %d %d\n", towards, w, a_message, one, two)
}
inline overtake(queue, towards, w) {
  queue?a_message,one,two,three; queue!a_message,one,two,three; troubles--;
  printf("overtake %d %d %e %d %d\n", towards, w, a_message, one, two)
}
