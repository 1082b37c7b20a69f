//! The driver layer on real devices.

use unisono::cuda::context::Devices;

#[test]
fn devices_are_found() {
    let devices = Devices::open().expect("a CUDA driver");
    assert!(devices.count() > 0);
    for device in 0..devices.count() {
        devices.context(device).expect("a primary context");
    }
}
