/* Couriers over a driver without GPUs: see courier.c. */
#pragma once

#include <stdint.h>

/* A courier with this parameter, behind what `stream` has been given. */
void launch_courier(intptr_t stream, const void *parameter);
