//! What a box answers is what the operation in it does.

use super::*;
use crate::engine::operation::Exits;

/// Overrides each method that has a default, and answers something else.
struct Other {
    exits: Arc<Exits>,
    prepared: Arc<AtomicUsize>,
}

const DONE: Completion = Completion { source: Some(3) };

impl Operation for Other {
    fn advance(&mut self, _group: &Group) -> Poll<Result<Completion>> {
        Poll::Ready(Ok(DONE))
    }

    fn abandon(&mut self, _group: &Group) {}

    fn cancel(&mut self, _group: &Group) -> Option<Completion> {
        Some(DONE)
    }

    fn waits_for(&self, _group: &Group) -> Vec<u32> {
        vec![1]
    }

    fn prepare(&mut self, _group: &Group) {
        self.prepared.fetch_add(1, Ordering::Relaxed);
    }

    fn mailbox(&self) -> Option<u32> {
        Some(5)
    }

    fn has_exchanged(&self) -> bool {
        true
    }

    fn is_at_work(&self) -> bool {
        true
    }

    fn through(&self) -> Through {
        Through::Memory
    }

    fn has_courier(&self) -> bool {
        true
    }

    fn asks_driver(&self) -> bool {
        true
    }

    fn standing(&self) -> Option<String> {
        Some("it stands".into())
    }

    fn exits(&self) -> Arc<Exits> {
        self.exits.clone()
    }
}

#[test]
fn a_box_forwards_what_has_a_default_too() {
    let [group, _other] = pair(true);
    let (exits, prepared) = (Arc::<Exits>::default(), Arc::new(AtomicUsize::new(0)));
    let other = Other { exits: exits.clone(), prepared: prepared.clone() };
    // As a generic function has it, which takes the box for the operation.
    fn check<O: Operation>(mut operation: O, group: &Group, exits: &Arc<Exits>) {
        assert!(matches!(operation.advance(group), Poll::Ready(Ok(DONE))));
        assert_eq!(operation.waits_for(group), [1]);
        operation.prepare(group);
        assert_eq!(operation.mailbox(), Some(5));
        assert!(operation.has_exchanged());
        assert!(operation.is_at_work());
        assert_eq!(operation.through(), Through::Memory);
        assert!(operation.has_courier());
        assert!(operation.asks_driver());
        assert_eq!(operation.standing().as_deref(), Some("it stands"));
        assert!(Arc::ptr_eq(&operation.exits(), exits));
        assert_eq!(operation.cancel(group), Some(DONE));
    }
    check(Box::new(other) as Box<dyn Operation>, &group, &exits);
    assert_eq!(prepared.load(Ordering::Relaxed), 1);
}

#[test]
fn what_is_in_a_box_stays_there() {
    let other = Other { exits: Arc::default(), prepared: Arc::default() };
    let once: Box<dyn Operation> = other.boxed();
    let place = (&raw const *once).addr();
    let again = once.boxed();
    assert_eq!((&raw const *again).addr(), place);
}
