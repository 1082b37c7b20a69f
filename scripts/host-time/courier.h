/* Couriers over a driver without GPUs: see courier.c. */
#pragma once

#include <stdint.h>

/* A courier with this parameter, behind what `stream` has been given. */
void launch_courier(intptr_t stream, const void *parameter);

/* Couriers of `stream` that come after this wait until the word is `value` or further on. */
void hold_couriers(intptr_t stream, const uint32_t *word, uint32_t value);
