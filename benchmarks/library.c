/* Times of libkvproto, in seconds of CPU: `library ROUNDS SOURCE SINK [SOURCE SINK ...]`, files of Descriptions; prints JSON. Compiled and run by library.py. */
#define _POSIX_C_SOURCE 200809L
#include <kvproto.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { PAGES = 2048, FRAMES = 4000, PLANS = 40 };
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}
static void check(int code, const char *what) {
    if (code) fprintf(stderr, "%s: %s\n", what, kvp_code_name(code)), exit(1);
}
static kvp_message *transfer(void) { /* of two groups, with as many pages of each, in no order */
    kvp_message *message = kvp_message_new(KVP_TRANSFER, NULL);
    kvp_value *root = kvp_fill(message);
    const uint8_t key[32] = {1};
    uint64_t pages[PAGES];
    static const int numbers[] = {KVP_TRANSFER_SESSION, KVP_TRANSFER_REQUEST, KVP_TRANSFER_SEQUENCE, KVP_TRANSFER_SOURCE_VERSION, KVP_TRANSFER_SINK_VERSION, KVP_TRANSFER_EPOCH};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) kvp_set_number(message, root, numbers[i], 1);
    for (uint64_t i = 0; i < PAGES; i++) pages[i] = i * 7919 % 60000;
    kvp_set_bytes(message, root, KVP_TRANSFER_TICKET, key, 16);
    kvp_set_bytes(message, root, KVP_TRANSFER_CONTENT, key, 32);
    kvp_set_numbers(message, root, KVP_TRANSFER_WRITERS, pages, 1);
    for (uint64_t group = 0; group < 2; group++) {
        kvp_value *grants = kvp_add_map(message, root, KVP_TRANSFER_GRANTS);
        kvp_set_number(message, grants, KVP_GRANTS_GROUP, group);
        kvp_set_number(message, grants, KVP_GRANTS_FIRST, 0);
        kvp_set_number(message, grants, KVP_GRANTS_COUNT, 16 * PAGES);
        kvp_set_number(message, grants, KVP_GRANTS_VALID, 16 * PAGES);
        kvp_set_numbers(message, grants, KVP_GRANTS_ITEMS, pages, PAGES);
    }
    return message;
}
static kvp_description *description(const char *path, double *taken) {
    char *bytes = malloc(1 << 20);
    FILE *file = fopen(path, "rb");
    if (!file) exit(1);
    size_t size = fread(bytes, 1, 1 << 20, file);
    kvp_description *found;
    fclose(file);
    double begin = now();
    for (int i = 0; i < PLANS; i++) {
        check(kvp_describe(bytes, size, NULL, &found, NULL), path);
        if (i < PLANS - 1) kvp_description_free(found);
    }
    *taken = (now() - begin) / PLANS;
    free(bytes);
    return found;
}
int main(int count, char **arguments) {
    static uint8_t frame[1 << 16];
    kvp_message *message = transfer(), *decoded;
    size_t size = 0;
    printf("[");
    for (int round = 0; round < atoi(arguments[1]); round++) {
        double begin = now();
        for (int i = 0; i < FRAMES; i++) check(kvp_encode(message, frame, sizeof frame, &size, NULL), "encode");
        double encoded = now();
        for (int i = 0; i < FRAMES; i++) {
            check(kvp_decode(frame, size, NULL, &decoded, NULL), "decode");
            kvp_message_free(decoded);
        }
        printf("%s{\"encode\": %.9f, \"decode\": %.9f, \"plans\": [", round ? ",\n" : "", (encoded - begin) / FRAMES, (now() - encoded) / FRAMES);
        for (int i = 2; i + 1 < count; i += 2) {
            double described[2];
            kvp_description *source = description(arguments[i], &described[0]), *sink = description(arguments[i + 1], &described[1]);
            kvp_plan *plan;
            begin = now();
            for (int n = 0; n < PLANS; n++) {
                check(kvp_plan_new(source, sink, 0, NULL, &plan, NULL), "plan");
                kvp_plan_free(plan);
            }
            printf("%s{\"describe\": %.9f, \"plan\": %.9f}", i > 2 ? ", " : "", described[0], (now() - begin) / PLANS);
            kvp_description_free(source);
            kvp_description_free(sink);
        }
        printf("]}");
    }
    printf("]\n");
    kvp_message_free(message);
    return 0;
}
