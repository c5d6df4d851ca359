/* A fuzz target for libFuzzer: the first byte says what is asked of the others. What is accepted has to come back the same when it is written. */
#include <kvproto.h>
#include <stdlib.h>
#include <string.h>

static const kvp_options SMALL = {.size = sizeof SMALL, .max_memory = 64 << 20};

static void written(const kvp_message *message, bool frame) { /* and read again */
    int (*encode)(const kvp_message *, void *, size_t, size_t *, kvp_error *) = frame ? kvp_encode : kvp_encode_struct;
    size_t size, again;
    kvp_error error;
    kvp_message *other;
    if (encode(message, NULL, 0, &size, &error) != KVP_NO_ROOM) abort();
    uint8_t *bytes = malloc(size), *second = malloc(size);
    if (encode(message, bytes, size, &size, &error)) abort();
    if (frame ? kvp_decode(bytes, size, &SMALL, &other, &error) : kvp_decode_struct((int)kvp_root(message)->layout, bytes, size, &SMALL, &other, &error)) abort();
    if (encode(other, second, size, &again, &error) || again != size || memcmp(bytes, second, size)) abort();
    kvp_message_free(other);
    free(bytes);
    free(second);
}
static void planned(const uint8_t *data, size_t size) { /* of two Descriptions, the length of the first in front */
    if (size < 2) return;
    size_t first = (size_t)data[0] << 8 | data[1];
    kvp_description *source = NULL, *sink = NULL;
    kvp_plan *plan = NULL;
    kvp_error error;
    if (first > size - 2) first = size - 2;
    kvp_describe(data + 2, first, &SMALL, &source, &error);
    kvp_describe(first == size - 2 ? data + 2 : data + 2 + first, first == size - 2 ? first : size - 2 - first, &SMALL, &sink, &error);
    if (source && sink) kvp_plan_new(source, sink, data[0], &SMALL, &plan, &error);
    kvp_plan_free(plan);
    kvp_description_free(source);
    kvp_description_free(sink);
}
static void streamed(const uint8_t *data, size_t size) {
    kvp_stream *stream = kvp_stream_new(&SMALL);
    const void *frame;
    size_t frame_size;
    kvp_message *message;
    kvp_value ids[2];
    for (size_t at = 0, step; at < size; at += step) {
        step = 1 + data[at] % 40;
        if (step > size - at) step = size - at;
        kvp_stream_feed(stream, data + at, step);
        while (kvp_stream_next(stream, &frame, &frame_size)) {
            kvp_frame_ids(frame, frame_size, &ids[0], &ids[1]);
            if (!kvp_decode(frame, frame_size, &SMALL, &message, NULL)) kvp_message_free(message);
        }
    }
    kvp_stream_free(stream);
}
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    kvp_message *message = NULL;
    if (!size) return 0;
    const uint8_t *bytes = data + 1;
    int ask = data[0] % 5, layout = (size > 1 && data[1] % 2 ? 0x10000 : 0) + (size > 1 ? data[1] / 2 : 0);
    size--;
    if (ask == 0 && !kvp_decode(bytes, size, &SMALL, &message, NULL)) written(message, true);
    if (ask == 1 && size && !kvp_decode_struct(layout, bytes + 1, size - 1, &SMALL, &message, NULL)) written(message, false);
    if (ask == 2 && size && !kvp_from_json(layout, (const char *)bytes + 1, size - 1, &SMALL, &message, NULL)) written(message, false);
    if (ask == 3) planned(bytes, size);
    if (ask == 4) streamed(bytes, size);
    kvp_message_free(message);
    return 0;
}
