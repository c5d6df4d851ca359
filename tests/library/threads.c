/* Threads that share Descriptions, a plan and a message: each plans, reads and writes by itself, and all have the same. Arguments: files of two Descriptions and a frame. */
#define _POSIX_C_SOURCE 200809L
#include <kvproto.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { THREADS = 4, TIMES = 20 };
static kvp_description *sides[2];
static kvp_message *message;
static char bytes[3][1 << 16];
static size_t sizes[3];

static void *work(void *digest) {
    for (int i = 0; i < TIMES; i++) {
        kvp_plan *plan;
        kvp_message *decoded;
        uint8_t frame[1 << 16];
        size_t size;
        if (kvp_plan_new(sides[0], sides[1], 0, NULL, &plan, NULL) || kvp_encode(message, frame, sizeof frame, &size, NULL) || kvp_decode(frame, size, NULL, &decoded, NULL)) return NULL;
        memcpy(digest, kvp_plan_digest(plan), 32);
        kvp_message_free(decoded);
        kvp_plan_free(plan);
    }
    return digest;
}
int main(int count, char **paths) {
    uint8_t digests[THREADS][32];
    pthread_t threads[THREADS];
    for (int i = 0; i < 3 && i + 1 < count; i++) {
        FILE *file = fopen(paths[i + 1], "rb");
        if (!file) return 2;
        sizes[i] = fread(bytes[i], 1, sizeof bytes[i], file);
        fclose(file);
    }
    if (kvp_describe(bytes[0], sizes[0], NULL, &sides[0], NULL) || kvp_describe(bytes[1], sizes[1], NULL, &sides[1], NULL) || kvp_decode(bytes[2], sizes[2], NULL, &message, NULL)) return 3;
    for (int i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, work, digests[i]);
    for (int i = 0; i < THREADS; i++) {
        void *done;
        pthread_join(threads[i], &done);
        if (!done || memcmp(digests[i], digests[0], 32)) return 4;
    }
    kvp_message_free(message);
    kvp_description_free(sides[0]);
    kvp_description_free(sides[1]);
    return 0;
}
